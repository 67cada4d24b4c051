// The random draw of the sampler. vllm_lite/worker/sampler.py defines the hash and the noise and is the reference: the
// hash is equal bit for bit, the noise to a few units in the last place.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common.h"

namespace {

VLLM_LITE_INLINE uint32_t rotl(uint32_t x, int bits) {
  return x << bits | x >> (32 - bits);
}

VLLM_LITE_INLINE uint32_t mix(uint32_t state, uint32_t key) {
  return rotl(state ^ (rotl(key * 0xcc9e2d51u, 15) * 0x1b873593u), 13) * 5 + 0xe6546b64u;
}

VLLM_LITE_INLINE uint32_t finish(uint32_t h) {
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
}

// The state before the token id is mixed in, the same for a whole row.
VLLM_LITE_INLINE uint32_t row_state(uint64_t seed, uint32_t child, uint32_t position) {
  const uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  return mix(mix(mix(low ^ 0x9e3779b9u, high), child), position);
}

VLLM_LITE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

VLLM_LITE_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr float kLn2 = 0.693147180559945309f;
constexpr uint32_t kOne = 0x3f800000;       // 1.0f
constexpr uint32_t kSqrtHalf = 0x3f3504f3;  // sqrt(0.5): mantissas are taken from [sqrt(0.5), sqrt(2))

// log(1 + f) for 1 + f in [sqrt(0.5), sqrt(2)), as 2 atanh(f / (2 + f)): relative error 2e-7, also for f next to 0.
VLLM_LITE_INLINE float log1p_reduced(float f) {
  const float s = f / (2 + f), z = s * s;
  return 2 * s + s * z * (2.0f / 3 + z * (2.0f / 5 + z * (2.0f / 7 + z * (2.0f / 9))));
}

struct Reduced {
  float exponent;  // a whole number
  float mantissa;  // in [sqrt(0.5), sqrt(2))
};

// x = mantissa * 2^exponent, for x > 0 and not denormal.
VLLM_LITE_INLINE Reduced reduce(float x) {
  const uint32_t shifted = bits_of(x) + (kOne - kSqrtHalf);
  const int32_t exponent = static_cast<int32_t>(shifted >> 23) - 127;
  return {static_cast<float>(exponent), float_of((shifted & 0x7fffff) + kSqrtHalf)};
}

// -log(-log(1 - v)). Where 1 - v would round v away, the exact -v goes into the series in its place.
VLLM_LITE_INLINE float gumbel_noise(uint32_t hash) {
  const float v = (static_cast<float>(static_cast<int32_t>(hash & 0x7fffffff)) + 0.5f) * 0x1.fffffep-32f;
  const Reduced u = reduce(1 - v);
  const float f = u.exponent == 0 ? -v : u.mantissa - 1;
  const Reduced e = reduce(-(u.exponent * kLn2 + log1p_reduced(f)));
  return -(e.exponent * kLn2 + log1p_reduced(e.mantissa - 1));
}

constexpr int32_t kLanes = 16;    // of one running maximum: a full vector of the widest instruction set
constexpr int32_t kChunk = 1024;  // scores kept on the stack between their computation and the search for the largest

struct Best {
  float score;
  int32_t token;
};

// The first largest of scores[0, count), if it exceeds what `best` has. kChunk entries may be read.
VLLM_LITE_INLINE void raise_best(const float* scores, int32_t count, int32_t first_token, Best* best) {
  float lanes[kLanes];
  for (int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = -INFINITY;
  for (int32_t i = 0; i < kChunk; i += kLanes) {
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = scores[i + lane] > lanes[lane] ? scores[i + lane] : lanes[lane];
    }
  }
  float top = -INFINITY;
  for (int32_t lane = 0; lane < kLanes; ++lane) top = lanes[lane] > top ? lanes[lane] : top;
  if (!(top > best->score)) return;
  int32_t i = 0;
  while (i < count - 1 && scores[i] != top) ++i;
  *best = {top, first_token + i};
}

VLLM_LITE_CLONES int32_t draw_row(const float* logits, int32_t vocab, float offset, float temperature, uint32_t state) {
  float scores[kChunk];
  Best best = {-INFINITY, 0};
  for (int32_t start = 0; start < vocab; start += kChunk) {
    const int32_t count = vocab - start < kChunk ? vocab - start : kChunk;
    for (int32_t i = 0; i < count; ++i) {
      const float noise = gumbel_noise(finish(mix(state, static_cast<uint32_t>(start + i))));
      scores[i] = (logits[start + i] - offset) / temperature + noise;
    }
    for (int32_t i = count; i < kChunk; ++i) scores[i] = -INFINITY;
    raise_best(scores, count, start, &best);
  }
  return best.token;
}

}  // namespace

// One draw; the same record as DRAW in vllm_lite/kernels/cpu/sampler.py.
struct Draw {
  int64_t row;
  uint64_t seed;
  uint32_t child;
  uint32_t position;
  float offset;
  float temperature;
};
static_assert(sizeof(Draw) == 32, "the record has no padding");

// For each draw: the first token with the largest (logits[row][token] - offset) / temperature + noise. `stride` is the
// distance of two rows, in floats. A row without a score above -infinity gives token 0. Both arrays are [num_draws].
VLLM_LITE_API void vllm_lite_draw(const float* logits, int64_t stride, int32_t vocab, int64_t num_draws,
                                  const Draw* draws, int64_t* tokens) {
  for (int64_t i = 0; i < num_draws; ++i) {
    const Draw& draw = draws[i];
    const uint32_t state = row_state(draw.seed, draw.child, draw.position);
    tokens[i] = draw_row(logits + draw.row * stride, vocab, draw.offset, draw.temperature, state);
  }
}

// For tests: the hash and the noise of tokens [0, vocab) of one row.
VLLM_LITE_API void vllm_lite_noise(uint64_t seed, uint32_t child, uint32_t position, int32_t vocab, uint32_t* hashes,
                                   float* noise) {
  const uint32_t state = row_state(seed, child, position);
  for (int32_t token = 0; token < vocab; ++token) {
    hashes[token] = finish(mix(state, static_cast<uint32_t>(token)));
    noise[token] = gumbel_noise(hashes[token]);
  }
}

// Raised with every change of a signature in this folder; vllm_lite/kernels/cpu/library.py refuses another one.
VLLM_LITE_API int32_t vllm_lite_abi() {
  return 2;
}
