// Cells of grouped weights (linear.h) from their codes.
#pragma once

#include <cstdint>

#include "linear.h"

struct GroupedRows {
  const uint8_t* codes;  // [num_outputs][num_inputs]
  int64_t stride;
  const float* scales;  // [num_outputs][groups]
  const float* minima;  // the same, or nullptr
};

// Packs one block of a weight into `to`, which must be zero.
void pack_cells(const PackedWeight& weight, const GroupedRows& rows, int64_t block, char* to);
