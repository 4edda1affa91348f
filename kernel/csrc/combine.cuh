// Joins the parts of tokens that were split. The order of a token's parts is fixed, whoever joins
// them, so the bits are the same on every run.
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

// By the block that wrote a token's last part, for few parts: a thread has four columns of eight rows
// at a time, so that their loads are on their way together. `weights` is shared memory.
__device__ __forceinline__ void combine_in_place(const Params& p, int token, const Slots& slots,
                                                 float* weights) {
  constexpr int kBatch = 8, kStep = kThreads * 4 / kWidth;  // rows of a thread, rows between them
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = threadIdx.x * 4 % kWidth, offset = threadIdx.x * 4 / kWidth;
  float* sums = weights + p.rows * slots.parts;
  for (int row = warp; row < p.heads; row += kWarps) {
    const float maximum = lse_maximum(p, slots, row, lane);
    float sum = 0.0f;
    for (int part = 0; part < slots.parts; ++part) {
      const float weight = exp2_fast(part_lse(p, slots, part, row) - maximum);
      weights[row * slots.parts + part] = weight;
      sum += weight;
    }
    sums[row] = sum;
    if (lane == 0) store_lse(p, token, row, sum, maximum);
  }
  __syncthreads();
  for (int first = offset; first < p.heads; first += kBatch * kStep) {
    float4 value[kBatch] = {};
#pragma unroll 2
    for (int part = 0; part < slots.parts; ++part) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = first + i * kStep;
        if (row >= p.heads) break;
        add(value[i], weights[row * slots.parts + part], part_values(p, slots, part, row, column));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      if (row < p.heads) store_values(p, token, row, column, value[i], sums[row]);
    }
  }
}

constexpr int kCombineColumns = 128;  // of a block, four a thread
constexpr int kCombineWarps = 8;      // each takes every eighth part

// A launch of its own, for many parts: block (token * heads + head, columns).
__global__ void __launch_bounds__(kCombineWarps * 32) combine(const __grid_constant__ Params p) {
  __shared__ float4 values[kCombineWarps][32];
  __shared__ float sums[kCombineWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x / p.heads, row = blockIdx.x % p.heads;
  const int column = blockIdx.y * kCombineColumns + lane * 4;
  const Slots slots = slots_of(p.plan, token);
  if (slots.parts == 1) return;  // already in place

  const float maximum = lse_maximum(p, slots, row, lane);
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float sum = 0.0f;
#pragma unroll 4
  for (int part = warp; part < slots.parts; part += kCombineWarps) {
    const float weight = exp2_fast(part_lse(p, slots, part, row) - maximum);
    add(value, weight, part_values(p, slots, part, row, column));
    sum += weight;
  }
  values[warp][lane] = value;
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  for (int other = 1; other < kCombineWarps; ++other) {
    add(value, 1.0f, values[other][lane]);
    sum += sums[other];
  }
  store_values(p, token, row, column, value, sum);
  if (column == 0) store_lse(p, token, row, sum, maximum);
}

}  // namespace glm53
