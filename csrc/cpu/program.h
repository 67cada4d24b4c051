// Functions of the interface that can be part of a program: calls that were recorded once and are made again by one
// call, the CPU twin of a CUDA graph. vllm_lite/kernels/cpu/program.py records them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "common.h"

namespace vllm_lite {

// An argument as it stands in a program: integers as 64 bits in two's complement, a float as its 32 bits.
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

// Makes `name` recordable, through a second function that takes its arguments from words. Such a function returns
// nothing, or -1 when it has done its work: anything else ends the program that it is part of.
#define VLLM_LITE_RECORDABLE(name)                               \
  VLLM_LITE_API int64_t name##_recorded(const uint64_t* words) { \
    return vllm_lite::call_with(&name, words);                   \
  }
