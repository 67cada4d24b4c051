// Passes of the sampler over a row. They are compiled without fused multiply-adds, so that every instruction set gives
// the same bits; most are plain loops, which the compiler turns into vectors.
#include "../sampler.h"

#include <cmath>

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int32_t kLanes = 16;     // of one running maximum: a full vector of the widest instruction set
constexpr int32_t kAtOnce = 1024;  // scores kept on the stack between their computation and the search for the largest

// ---- the hash and the noise

VLLM_LITE_INLINE uint32_t rotl(uint32_t x, int bits) {
  return x << bits | x >> (32 - bits);
}

VLLM_LITE_INLINE uint32_t token_hash(uint32_t state, uint32_t token) {
  uint32_t h = rotl(state ^ (rotl(token * 0xcc9e2d51u, 15) * 0x1b873593u), 13) * 5 + 0xe6546b64u;
  h = (h ^ h >> 16) * 0x85ebca6bu;
  h = (h ^ h >> 13) * 0xc2b2ae35u;
  return h ^ h >> 16;
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

VLLM_LITE_INLINE float distance_of(float logit, Scale scale) {
  return std::fabs((scale.best - logit) / scale.temperature);
}

// The first largest of scores[0, count), if it exceeds what `best` has; token is its index. kAtOnce entries are read.
VLLM_LITE_INLINE bool raise_best(const float* scores, int32_t count, Score* best) {
  float lanes[kLanes];
  for (int32_t lane = 0; lane < kLanes; ++lane) lanes[lane] = -INFINITY;
  for (int32_t i = 0; i < kAtOnce; i += kLanes) {
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = scores[i + lane] > lanes[lane] ? scores[i + lane] : lanes[lane];
    }
  }
  float top = -INFINITY;
  for (int32_t lane = 0; lane < kLanes; ++lane) top = lanes[lane] > top ? lanes[lane] : top;
  if (!(top > best->score)) return false;
  int32_t i = 0;
  while (i < count - 1 && scores[i] != top) ++i;
  *best = {top, i};
  return true;
}

VLLM_LITE_INLINE bool any(const float* distances, int32_t count, float reach) {
  int32_t found = 0;
  for (int32_t i = 0; i < count; ++i) found |= distances[i] <= reach;
  return found != 0;
}

// Appends the entries [from, from + kLanes) that are within reach to the lists, which have kSlack entries to spare;
// they may be the same memory as the sources if `to` <= `from`. A null list is left out.
VLLM_LITE_INLINE int32_t append(float reach, const float* distances, const int32_t* tokens, const float* weights,
                                int32_t to, float* distances_out, int32_t* tokens_out, float* weights_out) {
#if defined(__AVX512F__)
  const __m512 d = _mm512_loadu_ps(distances);
  const __mmask16 within = _mm512_cmp_ps_mask(d, _mm512_set1_ps(reach), _CMP_LE_OQ);
  const __m512i ids = _mm512_loadu_si512(tokens);
  _mm512_storeu_ps(distances_out + to, _mm512_maskz_compress_ps(within, d));
  _mm512_storeu_si512(tokens_out + to, _mm512_maskz_compress_epi32(within, ids));
  if (weights != nullptr) {
    _mm512_storeu_ps(weights_out + to, _mm512_maskz_compress_ps(within, _mm512_loadu_ps(weights)));
  }
  return to + __builtin_popcount(within);
#else
  for (int32_t i = 0; i < kLanes; ++i) {
    const float distance = distances[i];
    distances_out[to] = distance;
    tokens_out[to] = tokens[i];
    if (weights != nullptr) weights_out[to] = weights[i];
    to += distance <= reach;
  }
  return to;
#endif
}

}  // namespace

float group_maxima(const float* logits, int32_t count, float* maxima) {
  constexpr int kVecs = kGroupsPerBlock / kWidth;
  float tail[kBlock];
  Vec largest[kVecs];
  VecI nan[kVecs] = {};
  for (int v = 0; v < kVecs; ++v) largest[v] = splat(-INFINITY);
  for (int32_t start = 0; start < count; start += kBlock, maxima += kGroupsPerBlock) {
    const float* block = logits + start;
    if (count - start < kBlock) {
      for (int32_t i = 0; i < kBlock; ++i) tail[i] = i < count - start ? block[i] : -INFINITY;
      block = tail;
    }
    Vec top[kVecs];
    for (int v = 0; v < kVecs; ++v) top[v] = splat(-INFINITY);
    for (int32_t i = 0; i < kBlock; i += kGroupsPerBlock) {
      for (int v = 0; v < kVecs; ++v) {
        const Vec x = load(block + i + v * kWidth);
        nan[v] |= x != x;
        top[v] = max(x, top[v]);
      }
    }
    for (int v = 0; v < kVecs; ++v) {
      store(maxima + v * kWidth, top[v]);
      largest[v] = max(largest[v], top[v]);
    }
  }
  float best = -INFINITY;
  for (int v = 0; v < kVecs; ++v) {
    for (int i = 0; i < kWidth; ++i) {
      if (nan[v][i]) return NAN;
      best = largest[v][i] > best ? largest[v][i] : best;
    }
  }
  return best;
}

int32_t first_best(const float* logits, int32_t count, const float* maxima, float best) {
  for (int32_t start = 0; start < count; start += kBlock, maxima += kGroupsPerBlock) {
    int32_t here = 0;
    for (int32_t lane = 0; lane < kGroupsPerBlock; ++lane) here |= maxima[lane] == best;
    if (!here) continue;
    while (logits[start] != best) ++start;
    return start;
  }
  return 0;
}

void distances_of(const float* logits, int32_t count, Scale scale, float* distances) {
  for (int32_t i = 0; i < count; ++i) distances[i] = distance_of(logits[i], scale);
}

int32_t collect(const float* logits, int32_t count, const float* maxima, Scale scale, float reach, int32_t first_token,
                int32_t* tokens, float* distances) {
  float near[kBlock];
  int32_t ids[kBlock], found = 0;
  for (int32_t start = 0; start < count; start += kBlock, maxima += kGroupsPerBlock) {
    distances_of(maxima, kGroupsPerBlock, scale, near);
    if (!any(near, kGroupsPerBlock, reach)) continue;
    const int32_t here = count - start < kBlock ? count - start : kBlock;
    distances_of(logits + start, here, scale, near);
    for (int32_t i = here; i < kBlock; ++i) near[i] = NAN;  // within no reach
    for (int32_t i = 0; i < kBlock; ++i) ids[i] = first_token + start + i;
    for (int32_t i = 0; i < kBlock; i += kLanes) {
      if (any(near + i, kLanes, reach)) {
        found = append(reach, near + i, ids + i, nullptr, found, distances, tokens, nullptr);
      }
    }
  }
  return found;
}

int32_t strike(int32_t count, float reach, int32_t* tokens, float* distances, float* weights) {
  int32_t kept = 0;
  for (int32_t i = count; i < (count + kLanes - 1) / kLanes * kLanes; ++i) distances[i] = NAN;
  for (int32_t i = 0; i < count; i += kLanes) {
    if (!any(distances + i, kLanes, reach)) continue;
    kept = append(reach, distances + i, tokens + i, weights + i, kept, distances, tokens, weights);
  }
  return kept;
}

void weigh(const float* distances, int32_t count, float* weights) {
  for (int32_t i = 0; i < count; ++i) {
    const float y = (distances[i] < 28.0f ? distances[i] : 28.0f) * -1.44269504f;
    const float n = (y + 0x1.8p23f) - 0x1.8p23f, f = y - n;  // n is y rounded to a whole number
    float e = 1.5403530e-4f;
    e = e * f + 1.3333558e-3f;
    e = e * f + 9.6181291e-3f;
    e = e * f + 5.5504109e-2f;
    e = e * f + 2.4022651e-1f;
    e = e * f + 6.9314718e-1f;
    e = e * f + 1.0f;
    weights[i] = e * float_of(static_cast<uint32_t>(static_cast<int32_t>(n) + 127 + 40) << 23);
  }
}

Score draw_any(const float* logits, int32_t count, Scale scale, int32_t first_token, uint32_t state) {
  float scores[kAtOnce];
  Score best = {-INFINITY, 0};
  for (int32_t start = 0; start < count; start += kAtOnce) {
    const int32_t here = count - start < kAtOnce ? count - start : kAtOnce;
    for (int32_t i = 0; i < here; ++i) {
      const float noise = gumbel_noise(token_hash(state, static_cast<uint32_t>(first_token + start + i)));
      scores[i] = noise - distance_of(logits[start + i], scale);
    }
    for (int32_t i = here; i < kAtOnce; ++i) scores[i] = -INFINITY;
    if (raise_best(scores, here, &best)) best.token += first_token + start;
  }
  return best;
}

Score draw_listed(const int32_t* tokens, const float* distances, int32_t count, uint32_t state) {
  float scores[kAtOnce];
  Score best = {-INFINITY, 0};
  for (int32_t start = 0; start < count; start += kAtOnce) {
    const int32_t here = count - start < kAtOnce ? count - start : kAtOnce;
    for (int32_t i = 0; i < here; ++i) {
      scores[i] = gumbel_noise(token_hash(state, static_cast<uint32_t>(tokens[start + i]))) - distances[start + i];
    }
    for (int32_t i = here; i < kAtOnce; ++i) scores[i] = -INFINITY;
    if (raise_best(scores, here, &best)) best.token = tokens[start + best.token];
  }
  return best;
}

void noise_of(uint32_t state, int32_t count, uint32_t* hashes, float* noise) {
  for (int32_t token = 0; token < count; ++token) {
    hashes[token] = token_hash(state, static_cast<uint32_t>(token));
    noise[token] = gumbel_noise(hashes[token]);
  }
}

}  // namespace VLLM_LITE_ISA
