// Joins the parts of tokens that were split, in a launch of its own. The order in which a token's
// parts are added is fixed, so the bits are the same on every run.
//
// What was tried and lost (H200, CUDA graph, 16 heads): a programmatic dependent launch gains
// nothing. A block that finds itself the last of its token could join the parts at once, without
// this launch. It was tried and lost: the block must wait for its own stores to be seen by all,
// count, and fetch what others wrote, 7 us at 64 tokens, where this takes 4 (H200, CUDA graph, 16
// heads).
#pragma once

#include <cuda_runtime.h>

#include "config.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace glm53 {

constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float finite_or_zero(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// Partial results are read from L2: other blocks wrote them.
__device__ __forceinline__ float part_lse(const Params& p, const Slots& slots, int part, int row) {
  return __ldcg(p.part_lse + static_cast<int64_t>(slots.at(part)) * p.rows + row);
}

__device__ __forceinline__ float4 part_values(const Params& p, const Slots& slots, int part,
                                              int row, int column) {
  const int64_t at = static_cast<int64_t>(slots.at(part)) * p.rows + row;
  return __ldcg(reinterpret_cast<const float4*>(p.part_out + at * kWidth + column));
}

__device__ __forceinline__ void add(float4& sum, float weight, const float4& value) {
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
}

__device__ __forceinline__ float lse_maximum(const Params& p, const Slots& slots, int row,
                                             int lane) {
  float maximum = -INFINITY;
  for (int part = lane; part < slots.parts; part += 32)
    maximum = fmaxf(maximum, part_lse(p, slots, part, row));
  for (int offset = 16; offset; offset >>= 1)
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, offset));
  return finite_or_zero(maximum);
}

__device__ __forceinline__ void store_values(const Params& p, int token, int row, int column,
                                             const float4& value, float weight) {
  // A weight of zero: every part was masked. NaN stays NaN.
  const float factor = weight == 0.0f ? 0.0f : p.out_scale / weight;
  __nv_bfloat16* out = p.out + token * p.out_token_stride + row * p.out_head_stride + column;
  *reinterpret_cast<uint2*>(out) = make_uint2(pack<false>(value.x * factor, value.y * factor),
                                              pack<false>(value.z * factor, value.w * factor));
}

__device__ __forceinline__ void store_lse(const Params& p, int token, int row, float weight,
                                          float maximum) {
  if (p.lse != nullptr)
    p.lse[static_cast<int64_t>(token) * p.heads + row] =
        weight == 0.0f ? -INFINITY : (maximum + log2f(weight)) * kLn2;
}

// Block (split token * heads + head, columns). A thread has four columns; with more than one group,
// group g takes parts g, g + groups, ..., and the groups' sums are added in order. Few parts need
// one group, many are read faster by several.
template <int kGroups, int kColumnWarps>
__global__ void __launch_bounds__(kGroups * kColumnWarps * 32)
    combine(const __grid_constant__ Params p) {
  constexpr int kColumnThreads = kColumnWarps * 32;
  __shared__ float4 values[kGroups][kColumnThreads];
  __shared__ float sums[kGroups];
  const int group = threadIdx.x / kColumnThreads, thread = threadIdx.x % kColumnThreads;
  const int token = first_split_token(p.plan) + blockIdx.x / p.heads, row = blockIdx.x % p.heads;
  const int column = (blockIdx.y * kColumnThreads + thread) * 4;
  const Slots slots = slots_of(p.plan, token);
  if (slots.parts == 1) return;  // already in place

  const float maximum = lse_maximum(p, slots, row, threadIdx.x % 32);
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float sum = 0.0f;
#pragma unroll 8
  for (int part = group; part < slots.parts; part += kGroups) {
    const float weight = exp2_fast(part_lse(p, slots, part, row) - maximum);
    add(value, weight, part_values(p, slots, part, row, column));
    sum += weight;
  }
  if constexpr (kGroups > 1) {
    values[group][thread] = value;
    if (thread == 0) sums[group] = sum;
    __syncthreads();
    if (group != 0) return;
    for (int other = 1; other < kGroups; ++other) {
      add(value, 1.0f, values[other][thread]);
      sum += sums[other];
    }
  }
  store_values(p, token, row, column, value, sum);
  if (column == 0) store_lse(p, token, row, sum, maximum);
}

}  // namespace glm53
