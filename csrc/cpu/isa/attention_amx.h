// Attention by AMX, for any number of rows: packs 64 tokens once, as attention_tile.h does, for products of tiles.
//
// 32 rows at a time attend to the 64 keys: products, softmax, products. The order of additions is the same for all
// rows: 32 inputs of a head, or 32 tokens, are one product of tiles, and these products are added in order.
#pragma once

#include "attention_tile.h"
#include "tiles.h"

namespace VLLM_LITE_ISA {
namespace {

constexpr int kUnit = 32;  // rows, keys, or elements of V in two tiles

// The softmax of the rows of a unit. Products of other units are computed meanwhile.
struct UnitSoftmax : Softmax {
  static constexpr float kSlack = 8;  // weights may be up to 2^kSlack before sums are rescaled to a new largest score

  // 2^x with a relative error of 1e-4, exact for x = 0.
  inline __attribute__((always_inline)) static Vec weight(Vec x) {
    const Vec f = reinterpret_cast<Vec>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), 1));  // x - floor(x)
    Vec p = multiply_add(splat(7.7067353e-2f), f, splat(2.2764465e-1f));
    p = multiply_add(p, f, splat(6.9511688e-1f));
    p = multiply_add(p, f, splat(1));
    return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
  }

  // Turns the products of `count` rows from `row` on with the keys [first, end) into weights, as step() does.
  template <class Meanwhile>
  inline void step_unit(float (*products)[kKeys], BFloat16 (*weights)[kKeys], int row, int count, int first, int end,
                        const Meanwhile& meanwhile) {
    for (int i = 0; i < count && finishes_scores(); ++i) finish_scores(products[i], row + i, first);
    const float scale = finishes_scores() ? per_score : factor * per_score;
    if (end - first == kKeys && end <= seen_to[row] && first >= seen_from[row + count - 1]) {
      step_rows<false>(products, weights, row, count, first, end, scale, meanwhile);
    } else {
      step_rows<true>(products, weights, row, count, first, end, scale, meanwhile);
    }
  }

 private:
  template <bool kMasked, class Meanwhile>
  inline void step_rows(const float (*products)[kKeys], BFloat16 (*weights)[kKeys], int row, int count, int first,
                        int end, float scale, const Meanwhile& meanwhile) {
    for (int i = 0; i < count; i += kWidth) {
      find_tops<kMasked>(products + i, row + i, least(kWidth, count - i), first, end, scale);
      meanwhile(i / kWidth + 1);
    }
    for (int i = 0; i < count; ++i) {
      weigh_row<kMasked>(products[i], weights[i], row + i, first, end, scale);
      meanwhile(i + 3);
    }
  }

  template <bool kMasked>
  inline void find_tops(const float (*products)[kKeys], int row, int count, int first, int end, float scale) {
    Vec most[kWidth];
    for (int i = 0; i < count; ++i) most[i] = largest<kMasked>(products[i], row + i, first, end);
    const Vec found = largest_of_each(most, count), old = load_some(top + row, count);
    const Vec scaled = found > kNothing ? found * scale : found;
    const Vec now = scaled > old + splat(kSlack) ? scaled : old;
    store_some(top + row, now, count);
    store_some(rescale + row, weight(old - now), count);
  }

  template <bool kMasked>
  inline __attribute__((always_inline)) void weigh_row(const float* products, BFloat16* weights, int row, int first,
                                                       int end, float scale) {
    const Vec most = splat(top[row]);
    Vec total = load(sum[row]) * rescale[row];
#pragma GCC unroll 2
    for (int j = 0; j < kKeys; j += 2 * kWidth) {
      Vec x[2];
      for (int k = 0; k < 2; ++k) {
        x[k] = weight(load(products + j + k * kWidth) * scale - most);  // 0 for the largest, however large
        if (kMasked) x[k] = sees(row, first + j + k * kWidth, end) ? x[k] : Vec{};
        total += x[k];
      }
      Pairs::put_weights(weights + j, x[0], x[1]);
    }
    store(sum[row], total);
  }
};

constexpr int kTile = 256;           // words
constexpr int kMostBatch = 512;      // maximum keys that are packed at a time
constexpr int kBatchSize = 1 << 16;  // elements of K, or those of 64 keys

struct AmxScratch {
  static constexpr int kRows = 36864;  // elements of an item's rows, see max_rows, both filled up to units
  static constexpr int kWords = (kBatchSize > kKeys * kMaxHeadSize ? kBatchSize : kKeys * kMaxHeadSize) / 2;
  UnitSoftmax softmax;
  alignas(64) float keys[kWords];     // tiles [num_keys / 32][padded head_size / 32][2], each of words [16][16 keys]
  alignas(64) float values[kWords];   // tiles [num_keys / 64][padded value_size / 32][2][2], of [16 words][16]
  alignas(64) BFloat16 query[kRows];  // [rows][padded head_size], filled up with zeros
  alignas(64) float acc[kRows];       // [rows][padded value_size]
  alignas(64) float all[kRows];       // the same for the sections before
  alignas(64) float scores[2][kUnit][kKeys];  // of a unit, and of the next one
  alignas(64) BFloat16 weights[2][kUnit][kKeys];
  alignas(64) BFloat16 converted[kGroup * kMaxHeadSize];
  const char* rows[2][kMostBatch];  // of K in the cache: of this batch and of the next
};

// ---- packing

// Packs K of 16 tokens.
VLLM_LITE_INLINE void pack_keys(const char* const* rows, const Sizes& sizes, float* to) {
  for (int word = 0; word < sizes.query; word += kGroup, to += 2 * kTile) {
    Vec words[16];
    turn(rows, word * 4, least(kGroup, sizes.head / 2 - word), words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) store(to + i * kWidth, words[i]);
  }
}

// Packs V of 16 tokens.
VLLM_LITE_INLINE void pack_values(const char* const* rows, const Sizes& sizes, float* to) {
  for (int d = 0; d < sizes.padded; d += kUnit, to += 4 * kTile) {
    for (int t = 0; t < kGroup; t += 2) {
      const __m512i x = load_halves(rows[t] + 2 * d, sizes.value - d);
      const __m512i y = load_halves(rows[t + 1] + 2 * d, sizes.value - d);
      _mm512_store_si512(to + t / 2 * kWidth, pairs_low(x, y));
      _mm512_store_si512(to + kTile + t / 2 * kWidth, pairs_high(x, y));
    }
  }
}

// Packs K and V of `count` tokens, padded to whole units. Meanwhile prefetches the first num_next of `next`.
static void pack_tokens(AmxScratch& s, const AttentionCall& call, const char* const* keys, const Sizes& sizes,
                        int count, const char* const* next, int num_next) {
  const int kv_dtype = call.shape->kv_dtype;
  for (int token = 0; token < round_up(count, kUnit); token += kGroup) {
    const char* rows[kGroup];
    const int half = token / kGroup % 2, unit = token / kUnit;
    find_rows<Pairs>(s, kv_dtype, sizes.head, keys + token, 0, next + token, num_next - token, rows);
    pack_keys(rows, sizes, s.keys + unit * kUnit * sizes.query + half * kTile);
    if (call.value_offset != 0) {
      find_rows<Pairs>(s, kv_dtype, sizes.value, keys + token, call.value_offset, next + token, num_next - token, rows);
    }
    pack_values(rows, sizes, s.values + unit / 2 * kUnit * sizes.padded + unit % 2 * 2 * kTile + half * kTile / 2);
  }
}

// ---- tiles 0 to 3: sums, those of the first 16 rows in 0 and 1; 4 and 5: of the rows; 6 and 7: of K or V

VLLM_LITE_INLINE void shape_tiles_fully() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kTileRows);
  TILES_FENCE();
  TILES_SHAPE(&shapes);
}

// Adds x times y to the sums: 16 words of the rows, stride in words, times two tiles of K or V.
template <bool kTwo>
VLLM_LITE_INLINE void add_product(const float* x, int stride, const float* y) {
  TILE_LOAD(4, x, stride * 4);
  TILE_LOAD(6, y, kTileRowBytes);
  TILE_LOAD(7, y + kTile, kTileRowBytes);
  if constexpr (kTwo) TILE_LOAD(5, x + kTileRows * stride, stride * 4);
  TILE_DOT_BF16(0, 4, 6);
  TILE_DOT_BF16(1, 4, 7);
  if constexpr (kTwo) {
    TILE_DOT_BF16(2, 5, 6);
    TILE_DOT_BF16(3, 5, 7);
  }
}

// Up to 32 rows that attend to up to 64 keys.
struct Unit {
  int row, num_rows;
  int first, end;  // first key, and end of the keys that a row sees
  int packed;      // index of the first key among the packed ones
  int slot;        // index of its scores and weights

  bool two() const { return num_rows > kTileRows; }
  int num_products() const { return (end - first + kUnit - 1) / kUnit; }  // of 32 keys
};

// One step of a product of a unit's rows with 32 keys: 32 elements of K.
template <bool kTwo>
VLLM_LITE_INLINE void add_scores(AmxScratch& s, const Sizes& sizes, const Unit& unit, int step) {
  const int num_words = sizes.query / kGroup, word = step % num_words, key = step / num_words * kUnit;
  const float* query = reinterpret_cast<const float*>(s.query) + unit.row * sizes.query;
  if (word == 0) zero_sums<kTwo>();
  add_product<kTwo>(query + word * kTileRows, sizes.query,
                    s.keys + (unit.packed + key) * sizes.query + word * 2 * kTile);
  if (word + 1 == num_words) store_sums<kTwo>(s.scores[unit.slot][0] + key, kKeys);
}

// One step of adding weighted values to a unit's rows: 32 elements of V of 32 tokens.
template <bool kTwo>
VLLM_LITE_INLINE void add_values(AmxScratch& s, const Sizes& sizes, const Unit& unit, int step) {
  const int num_keys = unit.num_products(), key = step % num_keys, d = step / num_keys * kUnit;
  const float* weights = reinterpret_cast<const float*>(s.weights[unit.slot][0]);
  float* acc = s.acc + unit.row * sizes.padded + d;
  if (key == 0) load_sums<kTwo>(acc, sizes.padded);
  add_product<kTwo>(weights + key * kTileRows, kKeys / 2,
                    s.values + unit.packed / 2 * sizes.padded + (d / kUnit * 2 + key) * 2 * kTile);
  if (key + 1 == num_keys) store_sums<kTwo>(acc, sizes.padded);
}

// Products that are computed during the softmax of the unit between them.
struct Products {
  AmxScratch& s;
  const Sizes& sizes;
  const Unit* weighed;  // or null
  const Unit* scored;   // or null
  int num_weighing = 0, num_steps, step = 0;

  Products(AmxScratch& s, const Sizes& sizes, const Unit* weighed, const Unit* scored)
      : s(s), sizes(sizes), weighed(weighed), scored(scored) {
    if (weighed) num_weighing = sizes.padded / kUnit * weighed->num_products();
    num_steps = num_weighing;
    if (scored) num_steps += sizes.query / kGroup * scored->num_products();
  }

  __attribute__((noinline)) void run(int until) {
    TILES_FENCE();
    for (; step < until; ++step) {
      if (step < num_weighing) {
        weighed->two() ? add_values<true>(s, sizes, *weighed, step) : add_values<false>(s, sizes, *weighed, step);
      } else {
        const int at = step - num_weighing;
        scored->two() ? add_scores<true>(s, sizes, *scored, at) : add_scores<false>(s, sizes, *scored, at);
      }
    }
    TILES_FENCE();
  }
};

// Rescales the accumulators of rows to their new largest scores.
VLLM_LITE_INLINE void rescale_rows(AmxScratch& s, const Sizes& sizes, const Unit& unit) {
  for (int i = unit.row; i < unit.row + unit.num_rows; ++i) {
    const float factor = s.softmax.rescale[i];
    if (factor == 1) continue;
    float* acc = s.acc + i * sizes.padded;
    for (int d = 0; d < sizes.padded; d += kWidth) store(acc + d, load(acc + d) * factor);
  }
}

// A pipeline over units: the softmax of each runs together with the products of the previous and of the next one.
struct Pipeline {
  AmxScratch& s;
  const Sizes& sizes;
  Unit units[3];  // number i is units[i % 3]
  int count;

  Pipeline(AmxScratch& s, const Sizes& sizes) : s(s), sizes(sizes), count(0) {}

  void add(Unit unit) {
    unit.slot = count % 2;
    units[count % 3] = unit;
    ++count;
    step(count > 1 ? &units[(count - 2) % 3] : nullptr, count > 2 ? &units[count % 3] : nullptr,
         &units[(count - 1) % 3]);
  }

  void finish() {
    if (count == 0) return;
    const Unit* last = &units[(count - 1) % 3];
    step(last, count > 1 ? &units[(count - 2) % 3] : nullptr, nullptr);
    step(nullptr, last, nullptr);
  }

 private:
  void step(const Unit* unit, const Unit* weighed, const Unit* scored) {
    Products others(s, sizes, weighed, scored);
    if (unit) {
      const int parts = unit->num_rows + 2;
      const auto meanwhile = [&](int part) __attribute__((always_inline)) {
        const int until = others.num_steps * part / parts;
        if (until > others.step) others.run(until);
      };
      s.softmax.step_unit(s.scores[unit->slot], s.weights[unit->slot], unit->row, unit->num_rows, unit->first,
                          unit->end, meanwhile);
    }
    others.run(others.num_steps);
    if (unit) rescale_rows(s, sizes, *unit);
  }
};

// All rows of the item attend to the packed keys [first, end).
static void attend_units(AmxScratch& s, const Sizes& sizes, int num_rows, int first, int end, const NextRows& next) {
  const Softmax& softmax = s.softmax;
  Pipeline pipeline(s, sizes);
  for (int row = 0; row < num_rows; row += kUnit) {
    const int count = least(kUnit, num_rows - row), seen = least(end, softmax.seen_to[row + count - 1]);
    for (int key = first; key < seen; key += kKeys) {
      const int until = least(key + kKeys, seen);
      if (until > softmax.seen_from[row]) pipeline.add({row, count, key, until, key - first, 0});
    }
    next.fetch_part(row, row + kUnit, num_rows);
  }
  pipeline.finish();
}

// Addresses of the keys from `first` on that are packed together.
VLLM_LITE_INLINE void find_batch(const char** rows, const Cached& cache, const AttentionItem& item, int first,
                                 int batch) {
  for (int key = 0; key < batch && first + key < item.key_end; key += kKeys) {
    find_keys(rows + key, cache, first + key, item.key_begin, item.key_end);
  }
}

static void attend_by_tiles(const AttentionCall& call, const AttentionItem& item, int kv_head, NextUnit unit,
                            char* memory) {
  AmxScratch& s = *reinterpret_cast<AmxScratch*>(memory);
  const int head = round_up(call.shape->head_size, kUnit), value = call.shape->value_size;
  const Sizes sizes = {call.shape->head_size, value, head / 2, round_up(value, kUnit)};
  const Cached cache = cached(call, item, kv_head);
  const bool few = item.num_rows <= kFewRows;  // then packing takes most of the time
  const int many = kBatchSize / head / kKeys * kKeys, batch = few || many == 0 ? kKeys : least(many, kMostBatch);
  s.softmax.template init<Pairs>(call, item, kv_head);
  for (int i = 0; i < item.num_rows; ++i) load_query(call, item, kv_head, i, s.query + i * head, head);
  const char** now = s.rows[0];
  const char** ahead = s.rows[1];
  find_batch(now, cache, item, item.key_begin / kKeys * kKeys, batch);
  shape_tiles_fully();
  over_keys(call, item, kv_head, s.softmax, s.acc, s.all, sizes.padded, batch, [&](int first, int end) {
    NextRows next = next_rows(call, item, kv_head, unit, end, ahead);
    if (end < item.key_end) {
      find_batch(ahead, cache, item, end, batch);
      next.count = least(item.key_end - end, batch);
    }
    pack_tokens(s, call, now, sizes, end - first, ahead, few ? next.count : 0);
    if (few) next.count = 0;
    attend_units(s, sizes, item.num_rows, first, end, next);
    const char** const used = now;
    now = ahead;
    ahead = used;
  });
  TILES_RELEASE();
}

}  // namespace
}  // namespace VLLM_LITE_ISA
