// Rows of logits to tokens. vllm_lite/worker/sampling/sampler.py defines the result: the filters bit for bit, the noise
// to a few units in the last place. All sums are of integers and all ties go to the first token, so neither the number
// of threads nor how the work is cut can change it.
// A filtered row is never sorted. The largest logits of groups of 16 tokens give an upper bound for the distance of the
// k-th best token from the best one. The few tokens within this distance are listed, and all later work is on the list.
// A limit is found by radix selection over the bits of distances, 11 bits, then 10, then 10: each pass continues with
// the one bin in which the wanted sum is reached.
#include "sampler.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "common.h"
#include "thread_pool.h"

namespace {

using vllm_lite::num_threads;
using vllm_lite::parallel_for;
using vllm_lite::parallel_for_indexed;

// The lowest bit of each digit of a distance, whose sign bit is 0: for long lists, and for lists with fewer entries
// than kBins.
constexpr int kLongShifts[] = {20, 10, 0}, kShortShifts[] = {23, 15, 7, 0};
constexpr int kBins = 2048;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr float kNoMass = 28.0f;  // smallest distance at which a token's mass is 0
// The unit of work is a logit of a greedy row, 0.12 ns. Logits of other rows cost kDrawWork times as much, or more.
constexpr int64_t kDrawWork = 8;
constexpr int64_t kTaskWork = 1 << 15;    // 5 us or more
constexpr int64_t kSharedWork = 1 << 17;  // less work is faster on the calling thread alone
constexpr int32_t kPartTokens = 1 << 13;  // minimum tokens of a part of a row

uint32_t rotl(uint32_t x, int bits) {
  return x << bits | x >> (32 - bits);
}

uint32_t mix(uint32_t state, uint32_t key) {
  return rotl(state ^ (rotl(key * 0xcc9e2d51u, 15) * 0x1b873593u), 13) * 5 + 0xe6546b64u;
}

// The hash's state before the token id is mixed in, the same for a whole row.
uint32_t row_state(uint64_t seed, uint32_t sample, uint32_t position) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  return mix(mix(mix(low ^ 0x9e3779b9u, high), sample), position);
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A part of a row, and the data of the thread that works on it, all in scratch memory.
struct Part {
  const float* logits;
  int32_t first_token, size;
  int32_t count;  // entries of the lists, in the order of the tokens
  int32_t* tokens;
  float* distances;  // of the listed tokens; before that, of the groups
  float* weights;
  float* maxima;   // of the groups
  uint64_t* bins;  // [kBins]
  float best;
  Score drawn;
};

int64_t aligned(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

int32_t num_groups(int32_t size) {
  return (size + kBlock - 1) / kBlock * kGroupsPerBlock;
}

int64_t part_bytes(int32_t size) {
  return 3 * aligned((size + kSlack) * int64_t{4}) + aligned(num_groups(size) * int64_t{4}) + kBins * int64_t{8};
}

Part carve(char* memory, const float* logits, int32_t first_token, int32_t size) {
  Part part = {};
  const int64_t list = aligned((size + kSlack) * int64_t{4});
  part.logits = logits + first_token;
  part.first_token = first_token;
  part.size = size;
  part.bins = reinterpret_cast<uint64_t*>(memory);
  memory += kBins * int64_t{8};
  part.tokens = reinterpret_cast<int32_t*>(memory);
  part.distances = reinterpret_cast<float*>(memory + list);
  part.weights = reinterpret_cast<float*>(memory + 2 * list);
  part.maxima = reinterpret_cast<float*>(memory + 3 * list);
  return part;
}

// At least `bytes` of memory, aligned to 64 bytes, which the calling thread may use until its next call.
char* scratch(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t size = 0;
  if (size < bytes) {
    memory.reset(new char[static_cast<size_t>(bytes + 64)]);
    size = bytes;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.get());
  return memory.get() + (64 - address % 64);
}

// One row. If it has several parts, threads work on them in parallel.
struct Row {
  Part* parts;
  int32_t num_parts;
  int32_t vocab;
  Scale scale = {};

  template <class Body>
  void each(const Body& body) {
    if (num_parts == 1) return body(parts[0]);
    parallel_for(num_parts, [&](int64_t i) { body(parts[i]); });
  }

  int32_t listed() const {
    int32_t count = 0;
    for (int32_t i = 0; i < num_parts; ++i) count += parts[i].count;
    return count;
  }

  int32_t greedy(float best) const {
    for (int32_t i = 0; i < num_parts; ++i) {
      const Part& part = parts[i];
      if (part.best != best) continue;
      return part.first_token + VLLM_LITE_DISPATCH(first_best)(part.logits, part.size, part.maxima, best);
    }
    return 0;
  }

  float find_best() {
    each([](Part& part) { part.best = VLLM_LITE_DISPATCH(group_maxima)(part.logits, part.size, part.maxima); });
    float best = -INFINITY;
    for (int32_t i = 0; i < num_parts; ++i) {
      if (parts[i].best != parts[i].best) return NAN;
      best = parts[i].best > best ? parts[i].best : best;
    }
    return best;
  }

  void strike_beyond(float reach) {
    each([&](Part& part) {
      part.count = VLLM_LITE_DISPATCH(strike)(part.count, reach, part.tokens, part.distances, part.weights);
    });
  }

  // The smallest listed distance d such that amount(part, i), summed over all entries with a distance of at most d, is
  // at least wanted(total sum). The total must be enough for this.
  template <class Amount, class Wanted>
  float least(const Amount& amount, const Wanted& wanted) {
    uint32_t prefix = 0;
    uint64_t target = 0, below = 0;  // below: sum of the entries nearer than the bin
    const bool few = listed() < kBins;
    const int* shifts = few ? kShortShifts : kLongShifts;
    for (int digit = 0; digit < (few ? 4 : 3); ++digit) {
      const int shift = shifts[digit], above = digit == 0 ? 31 : shifts[digit - 1];
      const uint32_t num_bins = 1u << (above - shift);
      each([&](Part& part) {
        std::memset(part.bins, 0, num_bins * sizeof(uint64_t));
        for (int32_t i = 0; i < part.count; ++i) {
          const uint32_t bits = bits_of(part.distances[i]);
          if (digit == 0 || bits >> above == prefix) part.bins[bits >> shift & (num_bins - 1)] += amount(part, i);
        }
      });
      uint64_t* bins = parts[0].bins;
      for (int32_t i = 1; i < num_parts; ++i) {
        for (uint32_t bin = 0; bin < num_bins; ++bin) bins[bin] += parts[i].bins[bin];
      }
      if (digit == 0) {
        uint64_t total = 0;
        for (uint32_t bin = 0; bin < num_bins; ++bin) total += bins[bin];
        target = wanted(total);
      }
      uint32_t bin = 0;
      while (bin < num_bins - 1 && below + bins[bin] < target) below += bins[bin++];
      prefix = prefix << (above - shift) | bin;
      if (digit == 0) {
        const uint32_t last = ((prefix + 1) << shift) - 1;
        strike_beyond(float_of(last < kInfinity ? last : kInfinity));
      }
    }
    return float_of(prefix);
  }

  float kth_smallest(int64_t k) {
    return least([](const Part&, int32_t) { return uint64_t{1}; }, [k](uint64_t) { return static_cast<uint64_t>(k); });
  }

  // A distance within which there are at least k tokens: the distance of the k-th best group, or infinity.
  float reach_of(int32_t k) {
    each([&](Part& part) {
      part.count = num_groups(part.size);
      VLLM_LITE_DISPATCH(distances_of)(part.maxima, part.count, scale, part.distances);
    });
    return k > listed() ? INFINITY : kth_smallest(k);
  }

  // The distance of the top_p filter. The list has the k best tokens and `surplus` more that are equal to the last of
  // them.
  float nucleus(float top_p, float within_k, uint64_t surplus) {
    each([](Part& part) { VLLM_LITE_DISPATCH(weigh)(part.distances, part.count, part.weights); });
    float last_weight = 0;
    if (surplus > 0) VLLM_LITE_DISPATCH(weigh)(&within_k, 1, &last_weight);
    return least(
        [](const Part& part, int32_t i) { return static_cast<uint64_t>(static_cast<int64_t>(part.weights[i])); },
        [&](uint64_t total) {
          total -= surplus * static_cast<uint64_t>(static_cast<int64_t>(last_weight));
          return static_cast<uint64_t>(std::ceil(static_cast<double>(top_p) * static_cast<double>(total)));
        });
  }

  // Lists the tokens that pass the filters. Returns the greatest distance kept.
  float filter(const Draw& draw) {
    const bool limited = draw.top_k < vocab, nuclear = draw.top_p < 1;
    float reach = limited ? reach_of(draw.top_k) : nuclear ? kNoMass : draw.max_distance;
    each([&](Part& part) {
      part.count = VLLM_LITE_DISPATCH(collect)(part.logits, part.size, part.maxima, scale, reach, part.first_token,
                                               part.tokens, part.distances);
    });
    float within = INFINITY;
    uint64_t surplus = 0;
    if (limited) {
      within = kth_smallest(draw.top_k);
      strike_beyond(within);
      surplus = static_cast<uint64_t>(listed() - draw.top_k);
    }
    if (nuclear) within = nucleus(draw.top_p, within, surplus);
    within = draw.max_distance < within ? draw.max_distance : within;
    strike_beyond(within);
    return within;
  }

  int32_t pick(const Draw& draw, float* best_out, float* limit) {
    const float best = *best_out = find_best();
    *limit = INFINITY;
    if (draw.temperature == 0 || !std::isfinite(best)) return greedy(best);
    scale = {best, draw.temperature};
    const uint32_t state = row_state(draw.seed, draw.sample, draw.position);
    if (draw.top_k < vocab || draw.top_p < 1 || draw.max_distance < INFINITY) {
      *limit = filter(draw);
      each([&](Part& part) {
        part.drawn = VLLM_LITE_DISPATCH(draw_listed)(part.tokens, part.distances, part.count, state);
      });
    } else {
      each([&](Part& part) {
        part.drawn = VLLM_LITE_DISPATCH(draw_any)(part.logits, part.size, scale, part.first_token, state);
      });
    }
    Score top = {-INFINITY, 0};
    for (int32_t i = 0; i < num_parts; ++i) {
      if (parts[i].drawn.score > top.score) top = parts[i].drawn;
    }
    return top.token;
  }
};

}  // namespace

// Draws one token for each row of logits [num_rows, vocab]; `stride`: floats from row to row. Also returns the row's
// best logit, NaN if it has a NaN, and the greatest distance that its filters kept. The token is in the vocabulary,
// whatever the logits are.
VLLM_LITE_API void vllm_lite_sample(const float* logits, int64_t stride, int32_t vocab, int64_t num_rows,
                                    const Draw* draws, int64_t* tokens, float* best, float* limits) {
  int64_t work = 0;
  for (int64_t i = 0; i < num_rows; ++i) work += vocab * (draws[i].temperature == 0 ? 1 : kDrawWork);
  const int32_t threads = num_threads();
  const bool shared = threads > 1 && work >= kSharedWork;
  if (shared && num_rows < threads && vocab >= 2 * kPartTokens) {
    int32_t size = (vocab + threads - 1) / threads;
    size = ((size < kPartTokens ? kPartTokens : size) + kBlock - 1) / kBlock * kBlock;
    const int32_t num_parts = (vocab + size - 1) / size;
    const int64_t bytes = part_bytes(size), headers = aligned(num_parts * static_cast<int64_t>(sizeof(Part)));
    char* memory = scratch(headers + num_parts * bytes);
    Part* parts = reinterpret_cast<Part*>(memory);
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int32_t p = 0; p < num_parts; ++p) {
        const int32_t first = p * size, here = vocab - first < size ? vocab - first : size;
        parts[p] = carve(memory + headers + p * bytes, logits + i * stride, first, here);
      }
      tokens[i] = Row{parts, num_parts, vocab}.pick(draws[i], best + i, limits + i);
    }
    return;
  }
  const int64_t bytes = part_bytes(vocab);
  char* memory = scratch(shared ? threads * bytes : bytes);
  const auto sample = [=](int64_t first, int64_t last, int thread) {
    for (int64_t i = first; i < last; ++i) {
      Part part = carve(memory + thread * bytes, logits + i * stride, 0, vocab);
      tokens[i] = Row{&part, 1, vocab}.pick(draws[i], best + i, limits + i);
    }
  };
  if (!shared) return sample(0, num_rows, 0);
  const int64_t at_once = work < kTaskWork * num_rows ? kTaskWork * num_rows / work : 1;
  parallel_for_indexed((num_rows + at_once - 1) / at_once, [&](int64_t task, int thread) {
    sample(task * at_once, (task + 1) * at_once < num_rows ? (task + 1) * at_once : num_rows, thread);
  });
}

// For tests: the hash and the noise of tokens [0, vocab) of one row.
VLLM_LITE_API void vllm_lite_noise(uint64_t seed, uint32_t sample, uint32_t position, int32_t vocab, uint32_t* hashes,
                                   float* noise) {
  VLLM_LITE_DISPATCH(noise_of)(row_state(seed, sample, position), vocab, hashes, noise);
}

// Must be raised with every change of a signature in this folder; vllm_lite/kernels/cpu/library.py refuses other
// numbers.
VLLM_LITE_API int32_t vllm_lite_abi() {
  return 32;
}
