"""The time of a decode step, as a function of its rows and drafts; the number of drafts is chosen by it.

    time = (step + row * rows + verify (if there are drafts) + draft * (the most drafts of a sequence)) * factor

`rows` are the tokens that the step computes, drafts included. `verify` is the cost of having any drafts, `draft` the
time that a drafter with a model takes for one token of all sequences. Workers time some steps at their start, which
gives the first values of the four numbers; served steps correct them.

Rows differ in cost: kernels compute several at a time, and a few are free while the weights are read. So there is a
factor for each range of rows, which is known from the start and follows the measured times. The numbers are learned
from times divided by the start's factors, so they follow changes of the machine that affect all steps alike.
"""

from collections.abc import Sequence

from vllm_lite.engine.scheduling.rates import Rates, factor_place
from vllm_lite.protocol.control import STEP_ROWS, StepTiming
from vllm_lite.runtime.least_squares import eliminate

DECAY = 0.98
"""Weight of the previous step's data relative to a new one."""
HELD = (0.05, 8.0, 2.0, 8.0)
"""Weight of each number's value from the start, in units of steps that determine this number alone. The first number, a
step's fixed time, has little weight, because served steps also sample and answer."""
LOOSE = (1e-3, 1e-3, 1e-3, 1e-3)
"""The same weights without timed steps at the start."""
MIN_STEPS = 8
"""Minimum number of recent steps for an estimate, without timed steps at the start."""
MIN_SPREAD = 0.2
"""Minimum variance of recent steps' rows for an estimate of a row's time, without timed steps at the start."""
EVERY = 4
"""Period in steps of solving for the numbers while there are drafts, or more rows than ever before."""
SELDOM = 32
"""Longest period: otherwise it doubles each time that nothing has changed."""
ONE_IN = 4
"""While the period is the longest, one in this many steps without drafts counts."""
LARGE = 1e9
"""Weight of a step from which on all are divided by it."""
CHANGE = 0.1
"""Relative change of the predicted times below which the old numbers stay, because each change is a decision in the
trace."""
FACTOR_DECAY = 0.9
"""Weight of the previous step's ratio relative to a new one: a factor is about the mean of the last ten steps of its
size."""
FACTOR_HELD = 1.0
"""Weight of a factor from the start, in steps."""
FACTOR_CHANGE = 0.03
"""Like CHANGE, for factors."""
SIZE = 4

Numbers = tuple[float, float, float, float]
COMPARED: tuple[Numbers, ...] = ((1, 1, 0, 0), (1, 8, 0, 0), (1, 2, 1, 1), (1, 5, 1, 4))
"""Features of the steps whose predicted times are compared: 1, rows, whether there are drafts, and the most drafts of a
sequence."""


class RowFactors:
    """Mean ratios of measured to predicted step times, by `factor_place`."""

    def __init__(self, timings: Sequence[StepTiming] = (), numbers: Numbers = (0.0, 0.0, 0.0, 0.0)) -> None:
        """`timings`: steps timed at the start; `numbers`: fitted to these."""
        size = 2 * len(STEP_ROWS)
        self._sums, self._counts = [0.0] * size, [0.0] * size
        self._shifts, self._num_shifts = [0.0, 0.0], [0.0, 0.0]  # of steps without drafts, and with drafts
        self._latest_of: list[Numbers | None] = [None, None]
        of_place: dict[int, list[float]] = {}
        for each in timings:
            expected_s = _predict(numbers, _features(each.num_rows, each.most_drafts))
            of_place.setdefault(factor_place(each.num_rows, each.most_drafts), []).append(each.took_s / expected_s)
        self._start = [sum(of_place.get(place, [1.0])) / len(of_place.get(place, [1.0])) for place in range(size)]
        self._latest: dict[int, Numbers] = {}  # features of the latest step of each place

    def learn(self, features: Numbers, took_s: float, numbers: Numbers) -> None:
        """Learn from a step's time. `numbers` are those of the prediction."""
        place = factor_place(int(features[1]), int(features[3]))
        ratio = took_s / _predict(numbers, features)
        self._sums[place] = FACTOR_DECAY * self._sums[place] + ratio
        self._counts[place] = FACTOR_DECAY * self._counts[place] + 1.0
        self._latest[place] = features
        half = place // len(STEP_ROWS)
        self._shifts[half] = FACTOR_DECAY * self._shifts[half] + ratio / self._start[place]
        self._num_shifts[half] = FACTOR_DECAY * self._num_shifts[half] + 1.0
        self._latest_of[half] = features

    def of_start(self, features: Numbers) -> float:
        """The start's factor for steps of this size."""
        return self._start[factor_place(int(features[1]), int(features[3]))]

    def rebase(self, old: Numbers, new: Numbers) -> None:
        """Convert the means from ratios to predictions by `old` to ratios to predictions by `new`."""
        for place, features in self._latest.items():
            self._sums[place] *= _predict(old, features) / _predict(new, features)
        for half, latest in enumerate(self._latest_of):
            if latest is not None:
                self._shifts[half] *= _predict(old, latest) / _predict(new, latest)

    def means(self) -> tuple[float, ...]:
        """The factors. For sizes that have not been served: the start's factors, times the mean change of the served
        ones."""
        shifts = [
            (total + FACTOR_HELD) / (count + FACTOR_HELD)
            for total, count in zip(self._shifts, self._num_shifts, strict=True)
            for _ in STEP_ROWS
        ]
        return tuple(
            (total + FACTOR_HELD * start * shift) / (count + FACTOR_HELD)
            for total, count, start, shift in zip(self._sums, self._counts, self._start, shifts, strict=True)
        )


class StepCost:
    """Learns the four numbers by regularised least squares over recent steps, and the factors."""

    def __init__(self, timings: Sequence[StepTiming] = ()) -> None:
        """`timings`: steps that a worker has timed at its start; empty if it has not."""
        self.numbers: Numbers = (0.0, 0.0, 0.0, 0.0)
        """step, row, verify and draft; zeros while unknown."""
        self._start: Numbers = self.numbers
        self._held = LOOSE
        self._products = [[0.0] * SIZE for _ in range(SIZE)]
        self._right = [0.0] * SIZE
        self._weight = 1.0
        """Weight of the latest step: it grows, so that nothing else has to decay."""
        self._period = self._due = EVERY
        self._num_steps = 0
        self._by_rows = RowFactors()
        self.factors = self._by_rows.means()
        """By `factor_place`."""
        self._known_rows = 0
        if timings:
            for each in timings:
                self._add(_features(each.num_rows, each.most_drafts), each.took_s)
            self._start = self.numbers = self._solve()
            self._by_rows = RowFactors(timings, self.numbers)
            self.factors = self._by_rows.means()
            self._held = HELD
            self._products = [[0.0] * SIZE for _ in range(SIZE)]
            self._right = [0.0] * SIZE

    def rates(self, rates: Rates) -> Rates:
        """`rates`, with these numbers."""
        step_s, row_s, verify_s, draft_s = self.numbers
        factors = self.factors if row_s else ()
        found = rates._replace(step_s=step_s, row_s=row_s, verify_s=verify_s, draft_s=draft_s)
        return found._replace(row_factors=factors, known_rows=self._known_rows)

    def measure(self, num_rows: int, most_drafts: int, took_s: float) -> bool:
        """Learn from a step that computed `num_rows` rows and nothing else. Returns whether the numbers changed. Steps
        without rows, in which only images were computed, are ignored."""
        self._num_steps += 1
        if self._period == SELDOM and not most_drafts and self._num_steps % ONE_IN:
            return False
        if took_s <= 0 or num_rows <= 0:
            return False
        features = _features(num_rows, most_drafts)
        if self.numbers[1]:  # limits the weight of a step that was delayed by something else
            expected_s = _predict(self.numbers, features) * self._by_rows.of_start(features)
            took_s = min(took_s, 3 * expected_s)
            self._by_rows.learn(features, took_s, self.numbers)
        self._add(features, took_s / self._by_rows.of_start(features), self._next_weight())
        if most_drafts:
            self._period, self._due = EVERY, min(self._due, EVERY)
        self._due -= 1
        is_news = self._has_more_rows(num_rows if most_drafts else 0)
        if (self._due > 0 and not is_news) or not self._is_shown():
            return False
        is_changed = self._is_changed()
        self._period = EVERY if is_changed else min(2 * self._period, SELDOM)
        self._due = self._period if self._period < SELDOM else SELDOM // ONE_IN
        return is_changed or is_news

    def _has_more_rows(self, num_rows: int) -> bool:
        """Record the rows of a step with drafts. Returns whether it had more than any before."""
        has_more = num_rows > self._known_rows
        self._known_rows = max(self._known_rows, num_rows)
        return has_more

    def _is_changed(self) -> bool:
        """Solve for the numbers and factors, and set those that differ enough from the current ones. Returns whether
        any did."""
        new, old = self._solve(), self.numbers
        are_same = old[1] and all(_are_close(_predict(new, each), _predict(old, each)) for each in COMPARED)
        if not are_same:
            if old[1]:
                self._by_rows.rebase(old, new)
            self.numbers = new
        factors = self._by_rows.means()
        if are_same and all(map(_are_near, factors, self.factors)):
            return False
        self.factors = factors
        return True

    def _is_shown(self) -> bool:
        """Whether the recent steps determine the time of a row. Times from the start always do."""
        if self._held is HELD:
            return True
        (count, rows, *_), (_, squares, *_) = self._products[:2]
        return count >= MIN_STEPS * self._weight and squares / count - (rows / count) ** 2 >= MIN_SPREAD

    def _next_weight(self) -> float:
        self._weight /= DECAY
        if self._weight > LARGE:
            self._products = [[value / self._weight for value in row] for row in self._products]
            self._right = [value / self._weight for value in self._right]
            self._weight = 1.0
        return self._weight

    def _add(self, features: Numbers, took_s: float, weight: float = 1.0) -> None:
        for place, own in enumerate(features):
            if own:
                row, own_weight = self._products[place], own * weight
                for other, value in enumerate(features):
                    row[other] += own_weight * value
                self._right[place] += own_weight * took_s

    def _solve(self) -> Numbers:
        """The numbers with the best fit. Noise, and steps whose rows and drafts are correlated, make some negative:
        these are set to 0, and the others are solved for again. The time of a row is always positive."""
        free = list(range(SIZE))
        while True:
            found = dict.fromkeys(range(SIZE), 0.0) | dict(zip(free, self._solve_for(free), strict=True))
            if min(found.values()) >= 0:
                break
            free = [place for place in free if found[place] >= 0]
        row_s = max(found[1], 1e-3 * found[0], 1e-9)
        return found[0], row_s, found[2], found[3]

    def _solve_for(self, free: list[int]) -> list[float]:
        """The numbers at the places `free`; the others are 0."""
        held, products = [self._weight * value for value in self._held], self._products
        matrix = [
            [products[place][other] + (held[place] if place == other else 0.0) for other in free]
            + [self._right[place] + held[place] * self._start[place]]
            for place in free
        ]
        return eliminate(matrix)


def _features(num_rows: int, most_drafts: int) -> Numbers:
    return 1.0, float(num_rows), float(most_drafts > 0), float(most_drafts)


def _predict(numbers: Numbers, features: Numbers) -> float:
    (step_s, row_s, verify_s, draft_s), (one, rows, verifies, drafts) = numbers, features
    return step_s * one + row_s * rows + verify_s * verifies + draft_s * drafts


def _are_close(new: float, old: float) -> bool:
    return abs(new - old) < CHANGE * old


def _are_near(new: float, old: float) -> bool:
    return abs(new - old) < FACTOR_CHANGE * old
