// What a launch hands to its kernels.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "schedule.cuh"

namespace glm53 {

// The place of row r in the pool, in bytes, is r * row_bytes + (r / page_size) * page_gap. The
// division is a multiplication: page = (r * page_factor >> 32) >> page_shift, exact for r < 2^31.
struct Pool {
  const uint8_t* base;
  int64_t row_bytes;
  int64_t page_gap;
  uint32_t page_factor;  // 0 where there are no pages
  uint32_t page_shift;
  int64_t rows;
};

struct Params {
  Schedule plan;
  Pool kv;
  const __nv_bfloat16* q;
  int64_t q_token_stride;
  int64_t q_head_stride;
  const int32_t* indices;
  int64_t index_stride;
  __nv_bfloat16* out;
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse;
  int32_t heads;
  int32_t width;
  float score_scale;  // softmax_scale * kv_scale * log2(e): scores are powers of two from here on
  float out_scale;    // kv_scale

  // Partial results: per slot and row 512 values, normalised, and the log2 of what they were
  // divided by.
  int32_t rows;  // of a slot
  float* part_lse;
  float* part_out;
};

}  // namespace glm53
