"""Nonnegative least squares, from the normal equations."""

from collections.abc import Sequence


def nonnegative(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Nonnegative numbers for which matrix * numbers is nearest to `right`; matrix: symmetric and positive [size,
    size].

    Lawson and Hanson's method (Solving Least Squares Problems, 1974): numbers start fixed at 0 and are freed one at a
    time, the most helpful first; a number that others would make negative is fixed at 0 again.
    """
    size = len(right)
    found, free = [0.0] * size, list[int]()
    scales = [max(matrix[place][place], 1e-300) ** 0.5 for place in range(size)]
    for _ in range(10 * size):
        gains = {
            place: (right[place] - _product(matrix[place], found)) / scales[place]
            for place in range(size)
            if place not in free
        }
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or gains[best] <= 1e-12 * max(1.0, max(map(abs, right)) / scales[best]):
            break
        free.append(best)
        while True:
            new = dict(zip(free, _solve_for(matrix, right, free), strict=True))
            if min(new.values()) > 0:
                break
            # Step towards them only until a number reaches 0.
            share = min(found[place] / (found[place] - new[place]) for place in free if new[place] <= 0)
            for place in free:
                found[place] += share * (new[place] - found[place])
            free = [place for place in free if found[place] > 1e-15]
            if not free:
                return [0.0] * size
        found = [new.get(place, 0.0) for place in range(size)]
    return found


def eliminate(matrix: list[list[float]]) -> list[float]:
    """Solve a symmetric, positive system in place; each row ends with its right-hand side."""
    for place, pivot in enumerate(matrix):
        for row in matrix[place + 1 :]:
            factor = row[place] / pivot[place]
            for column in range(place, len(row)):
                row[column] -= factor * pivot[column]
    found = [0.0] * len(matrix)
    for place in reversed(range(len(matrix))):
        row = matrix[place]
        known = sum(row[column] * found[column] for column in range(place + 1, len(matrix)))
        found[place] = (row[-1] - known) / row[place]
    return found


def _solve_for(matrix: Sequence[Sequence[float]], right: Sequence[float], free: Sequence[int]) -> list[float]:
    return eliminate([[matrix[place][other] for other in free] + [right[place]] for place in free])


def _product(row: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(map(float.__mul__, row, numbers))
