// The blocks of GGUF files (https://github.com/ggml-org/ggml has the formats) as codes, scales and minima.
#pragma once

#include <cstdint>

#include "isa.h"

// The same record as `_Rows` in vllm_lite/kernels/cpu/weights/gguf_blocks.py. All outputs are row-major.
struct GgufRows {
  const uint8_t* rows;  // [num_rows][blocks_per_row][bytes of a block]
  int64_t stride;       // bytes from one row to the next
  int64_t num_rows;
  int64_t blocks_per_row;
  uint8_t* codes;       // [num_rows][inputs]
  float* scales;        // [num_rows][inputs / group]
  float* minima;        // the same, for types that have any
  float* scale_supers;  // [num_rows][blocks_per_row], for types whose scales are integers times a number for each block
  float* minima_supers;  // the same for minima
  int32_t type;          // ggml's number
  int32_t as_integers;   // whether scales and minima that have supers are left as integers
};

// Unpacks all rows. Returns false and writes nothing if the type is unknown.
VLLM_LITE_DECLARE(bool take_apart(const GgufRows& rows))
