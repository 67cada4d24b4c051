// The layouts of GGUF's types of blocks. The plain twin, equal bit for bit, is vllm_lite/kernels/gguf_blocks.py.
//
// A type is a struct with the elements, bytes and groups of a block, and `take`, which unpacks one block. The loops
// have constant bounds and no branches, so that the compiler vectorises them.
#include "../gguf.h"

#include "simd.h"

namespace VLLM_LITE_ISA {
namespace {

// The outputs of one block.
struct Parts {
  uint8_t* codes;
  float* scales;
  float* minima;
  float* scale_super;
  float* minima_super;
  bool as_integers;

  // Factor of the integer scales or minima: their super, or 1 if they are left as integers.
  inline __attribute__((always_inline)) float unit(float super) const { return as_integers ? 1.0f : super; }
};

VLLM_LITE_INLINE float half(const uint8_t* from) {
  Float16 found;
  std::memcpy(&found, from, sizeof found);
  return to_float(found);
}

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Splits bytes of two codes each: first all low halves, then all high ones. kBytes is a multiple of 16.
template <int kBytes>
VLLM_LITE_INLINE void nibbles(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < kBytes; i += 16) {
    Bytes both;
    std::memcpy(&both, from + i, sizeof both);
    const Bytes low = both & 15, high = both >> 4;
    std::memcpy(to + i, &low, sizeof low);
    std::memcpy(to + kBytes + i, &high, sizeof high);
  }
}

// Adds 16 to the codes whose bits at `from` are set, of 32, and kMore to all.
template <uint8_t kMore>
VLLM_LITE_INLINE void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
  constexpr Bytes kBits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  for (int i = 0; i < 2; ++i, from += 2, codes += 16) {
    const uint64_t halves[2] = {from[0] * 0x0101010101010101u, from[1] * 0x0101010101010101u};
    Bytes bits, own;
    std::memcpy(&bits, halves, sizeof bits);
    std::memcpy(&own, codes, sizeof own);
    own += (reinterpret_cast<Bytes>((bits & kBits) != 0) & 16) + kMore;
    std::memcpy(codes, &own, sizeof own);
  }
}

// Splits 64 bytes of four codes each: of every 32 bytes first all lowest pairs of bits, then the next ones, and so on.
VLLM_LITE_INLINE void pairs(const uint8_t* from, uint8_t* to) {
  for (int part = 0; part < 2; ++part) {
    for (int shift = 0; shift < 4; ++shift) {
      for (int i = 0; i < 32; ++i) to[32 * shift + i] = from[i] >> (2 * shift) & 3;
    }
    from += 32, to += 128;
  }
}

// Types of 32 elements with one scale. They differ in the places of the minimum, the fifth bits and the nibbles.
struct Q4_0 {
  static constexpr int kElements = 32, kBytes = 18, kGroups = 1;
  static void take(const uint8_t* block, const Parts& to) {
    to.scales[0] = half(block);
    nibbles<16>(block + 2, to.codes);
  }
};
struct Q4_1 {
  static constexpr int kElements = 32, kBytes = 20, kGroups = 1;
  static void take(const uint8_t* block, const Parts& to) {
    to.scales[0] = half(block);
    to.minima[0] = -half(block + 2);
    nibbles<16>(block + 4, to.codes);
  }
};
struct Q5_0 {
  static constexpr int kElements = 32, kBytes = 22, kGroups = 1;
  static void take(const uint8_t* block, const Parts& to) {
    to.scales[0] = half(block);
    nibbles<16>(block + 6, to.codes);
    add_fifth_bits<112>(block + 2, to.codes);
  }
};
struct Q5_1 {
  static constexpr int kElements = 32, kBytes = 24, kGroups = 1;
  static void take(const uint8_t* block, const Parts& to) {
    to.scales[0] = half(block);
    to.minima[0] = -half(block + 2);
    nibbles<16>(block + 8, to.codes);
    add_fifth_bits<0>(block + 4, to.codes);
  }
};
struct Q8_0 {
  static constexpr int kElements = 32, kBytes = 34, kGroups = 1;
  static void take(const uint8_t* block, const Parts& to) {
    to.scales[0] = half(block);
    for (int i = 0; i < 32; ++i) to.codes[i] = block[2 + i] ^ 128;
  }
};
struct Mxfp4 {
  static constexpr int kElements = 32, kBytes = 17, kGroups = 1;
  static void take(const uint8_t* block, const Parts& to) {
    const uint32_t exponent = block[0];  // exponent of 2, plus 127; 2^-127 is a denormal float
    to.scales[0] = float_of(exponent == 0 ? 1u << 22 : exponent << 23);
    nibbles<16>(block + 1, to.codes);
  }
};

// Types of 256 elements. Their scales are integers times a number of the block.
struct Q2K {
  static constexpr int kElements = 256, kBytes = 84, kGroups = 16;
  static void take(const uint8_t* block, const Parts& to) {
    const float scale = to.unit(*to.scale_super = half(block + 80));
    const float minimum = to.unit(*to.minima_super = half(block + 82));
    for (int i = 0; i < kGroups; ++i) {
      to.scales[i] = scale * static_cast<float>(block[i] & 15);
      to.minima[i] = minimum * static_cast<float>(block[i] >> 4);
    }
    pairs(block + 16, to.codes);
  }
};
struct Q3K {
  static constexpr int kElements = 256, kBytes = 110, kGroups = 16;
  static void take(const uint8_t* block, const Parts& to) {
    const float scale = to.unit(*to.scale_super = half(block + 108));
    const uint8_t* packed = block + 96;  // 16 scales: low halves in 8 bytes, high pairs of bits in 4
    for (int i = 0; i < kGroups; ++i) {
      const int low = packed[i % 8] >> (i / 8 * 4) & 15, high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
      to.scales[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
    pairs(block + 32, to.codes);
    for (int bit = 0; bit < 8; ++bit) {  // a clear bit subtracts 4
      uint8_t* codes = to.codes + 32 * bit;
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] + ((block[i] >> bit & 1) << 2) + 124);
    }
  }
};

// Unpacks the beginning of a block: two numbers, then 8 scales and 8 minima of 6 bits in 12 bytes.
VLLM_LITE_INLINE void six_bits(const uint8_t* block, const Parts& to) {
  const float scale = to.unit(*to.scale_super = half(block));
  const float minimum = to.unit(*to.minima_super = half(block + 2));
  const uint8_t* packed = block + 4;
  for (int i = 0; i < 4; ++i) {
    const uint8_t first = packed[i], second = packed[4 + i], third = packed[8 + i];
    to.scales[i] = scale * static_cast<float>(first & 63);
    to.minima[i] = minimum * static_cast<float>(second & 63);
    to.scales[4 + i] = scale * static_cast<float>((third & 15) | first >> 6 << 4);
    to.minima[4 + i] = minimum * static_cast<float>(third >> 4 | second >> 6 << 4);
  }
}
struct Q4K {
  static constexpr int kElements = 256, kBytes = 144, kGroups = 8;
  static void take(const uint8_t* block, const Parts& to) {
    six_bits(block, to);
    for (int part = 0; part < 4; ++part) nibbles<32>(block + 16 + 32 * part, to.codes + 64 * part);
  }
};
struct Q5K {
  static constexpr int kElements = 256, kBytes = 176, kGroups = 8;
  static void take(const uint8_t* block, const Parts& to) {
    six_bits(block, to);
    for (int part = 0; part < 4; ++part) nibbles<32>(block + 48 + 32 * part, to.codes + 64 * part);
    for (int bit = 0; bit < 8; ++bit) {
      uint8_t* codes = to.codes + 32 * bit;
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (block[16 + i] >> bit & 1) << 4);
    }
  }
};
struct Q6K {
  static constexpr int kElements = 256, kBytes = 210, kGroups = 16;
  static void take(const uint8_t* block, const Parts& to) {
    const float scale = to.unit(*to.scale_super = half(block + 208));
    for (int i = 0; i < kGroups; ++i) {
      to.scales[i] = scale * static_cast<float>(static_cast<int8_t>(block[192 + i]));
    }
    for (int part = 0; part < 2; ++part) {  // low halves in 64 bytes, high pairs of bits in 32
      nibbles<64>(block + 64 * part, to.codes + 128 * part);
    }
    for (int part = 0; part < 8; ++part) {
      const uint8_t* high = block + 128 + 32 * (part / 4);
      uint8_t* codes = to.codes + 32 * part;
      const int shift = part % 4 * 2;
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>((codes[i] | (high[i] >> shift & 3) << 4) + 96);
    }
  }
};
struct Iq4Xs {
  static constexpr int kElements = 256, kBytes = 136, kGroups = 8;
  static void take(const uint8_t* block, const Parts& to) {
    const float scale = to.unit(*to.scale_super = half(block));
    for (int i = 0; i < kGroups; ++i) {  // high pairs of bits in 2 bytes, low halves in 4
      const int high = block[2 + i / 4] >> (i % 4 * 2) & 3, low = block[4 + i / 2] >> (i % 2 * 4) & 15;
      to.scales[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
    for (int part = 0; part < 8; ++part) nibbles<16>(block + 8 + 16 * part, to.codes + 32 * part);
  }
};

// nullptr if the call has none of these.
VLLM_LITE_INLINE float* at(float* all, int64_t index) {
  return all == nullptr ? nullptr : all + index;
}

template <class Type>
void take_rows(const GgufRows& all) {
  for (int64_t row = 0; row < all.num_rows; ++row) {
    const uint8_t* from = all.rows + row * all.stride;
    for (int64_t i = 0; i < all.blocks_per_row; ++i, from += Type::kBytes) {
      const int64_t block = row * all.blocks_per_row + i, group = block * Type::kGroups;
      Type::take(from, {all.codes + block * Type::kElements, all.scales + group, at(all.minima, group),
                        at(all.scale_supers, block), at(all.minima_supers, block), all.as_integers != 0});
    }
  }
}

}  // namespace

bool take_apart(const GgufRows& rows) {
  switch (rows.type) {
    case 2:   // Q4_0
    case 20:  // IQ4_NL: the same layout, but codes index a table
      return take_rows<Q4_0>(rows), true;
    case 3:
      return take_rows<Q4_1>(rows), true;
    case 6:
      return take_rows<Q5_0>(rows), true;
    case 7:
      return take_rows<Q5_1>(rows), true;
    case 8:
      return take_rows<Q8_0>(rows), true;
    case 10:
      return take_rows<Q2K>(rows), true;
    case 11:
      return take_rows<Q3K>(rows), true;
    case 12:
      return take_rows<Q4K>(rows), true;
    case 13:
      return take_rows<Q5K>(rows), true;
    case 14:
      return take_rows<Q6K>(rows), true;
    case 23:
      return take_rows<Iq4Xs>(rows), true;
    case 39:
      return take_rows<Mxfp4>(rows), true;
  }
  return false;
}

}  // namespace VLLM_LITE_ISA
