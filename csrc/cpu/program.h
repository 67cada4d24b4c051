// Functions that can be part of a program: calls that are recorded once and repeated together by one call, like a CUDA
// graph. vllm_lite/kernels/cpu/program.py records them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common.h"

namespace vllm_lite {

// Decodes an argument of a recorded call: integers are 64 bits in two's complement, a float is its 32 bits.
template <class T>
T from_word(uint64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(word);
  } else {
    static_assert(std::is_same_v<T, float>, "words hold pointers, integers and floats");
    const uint32_t bits = static_cast<uint32_t>(word);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
}

template <class Result, class... Args, size_t... I>
int64_t call_with(Result (*function)(Args...), const uint64_t* words, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Result>) {
    function(from_word<Args>(words[I])...);
    return -1;
  } else {
    return function(from_word<Args>(words[I])...);
  }
}

template <class Result, class... Args>
int64_t call_with(Result (*function)(Args...), const uint64_t* words) {
  return call_with(function, words, std::index_sequence_for<Args...>());
}

using RecordedCall = int64_t (*)(const uint64_t* words);

}  // namespace vllm_lite

// Makes `name` recordable by defining a second function, which takes its arguments from words. A recordable function
// returns nothing, or -1 for success; any other result ends the program.
#define VLLM_LITE_RECORDABLE(name)                               \
  VLLM_LITE_API int64_t name##_recorded(const uint64_t* words) { \
    return vllm_lite::call_with(&name, words);                   \
  }
