// Two products of a program as one job.
#pragma once

#include <cstdint>

// Whether two products that follow each other in a program, by their words, can be one job: products of the same few
// rows. Each thread then computes its part of both, so that threads meet once.
bool are_pair(const uint64_t* first, const uint64_t* second);
void linear_pair(const uint64_t* first, const uint64_t* second);
