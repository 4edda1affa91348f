// The attention kernel. config.cuh says how warps and shared memory are shared out, schedule.cuh
// which keys a block gets. For each tile of keys:
//
//   1. wait for the tile; start the copy of the one that takes the place of the tile before it
//   2. scores = Q K^T in the warp's share; exchange between the two halves of the values
//   3. row maxima across key groups; P = 2^(scores - maximum) to shared memory
//   4. output = output * factor + P V in the warp's columns (V is the same tile, read transposed)
//
// Rows come by cp.async, 16 bytes a lane: a masked index copies nothing and fills zeros, so a row
// that was not selected is never read. Chunks of 16 bytes are stored at (chunk ^ row % 8), which
// makes both ways of ldmatrix free of bank conflicts. Nothing here needs more than sm_80 but the
// e4m3 conversion.
#pragma once

#include <cuda_runtime.h>

#include "combine.cuh"
#include "config.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace glm53 {

template <typename C>
class Block {
 public:
  __device__ __forceinline__ Block(const Params& params, uint8_t* shared)
      : p(params),
        ring(shared),
        probabilities(shared + C::kRingBytes),
        inboxes(shared + C::kRingBytes + C::kProbabilityBytes),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        head_tile(warp / (C::kKeyGroups * C::kHalves)),
        half(warp / C::kKeyGroups % C::kHalves),
        key_group(warp % C::kKeyGroups) {}

  // One range of one token, from its indices to sums in registers and shared memory.
  __device__ __forceinline__ void attend(const Range& range) {
    indices = p.indices + range.token * p.index_stride;
    first_tile = range.begin;
    end_tile = range.end;
    load_queries_and_first_tiles(range.token);
    reset();
    int slot = 0;
    for (int tile = first_tile; tile < end_tile; ++tile) {
      copy_async_wait<C::kStages - 2>();
      __syncthreads();
      load_ahead(tile, slot);
      const uint32_t valid = __ballot_sync(~0u, score_index >= 0);
      score_index = index_of_score(tile + 1);
      const uint32_t keys = shared_address(ring) + slot * C::kTileBytes;
      float s[C::kOwnRows][C::kOctets][2];
      scores(keys, s);
      softmax(valid, s);
      __syncthreads();
      rescale();
      accumulate(keys);
      slot = slot + 1 == C::kStages ? 0 : slot + 1;
    }
    copy_async_wait<0>();
    __syncthreads();
    share_totals();
  }

  // Writes the range's output, or its part of it.
  __device__ __forceinline__ void finish(int token, int slot) {
    const Slots slots = slots_of(p.plan, token);
    for_rows([&](int row, const float (&o)[8][4], int at, float total, float lse) {
      if (slots.parts == 1)
        store_whole(token, row, o, at, total == 0.0f ? 0.0f : p.out_scale / total, lse);
      else
        store_part(slot, row, o, at, total == 0.0f ? 0.0f : 1.0f / total, lse);
    });
    __syncthreads();  // shared memory is free for the next range
  }

 private:
  const Params& p;
  uint8_t* const ring;
  uint8_t* const probabilities;
  uint8_t* const inboxes;
  const int warp, lane;
  const int head_tile, half, key_group;  // of this warp, for scores

  const int32_t* indices;
  int first_tile, end_tile;
  int32_t copy_index;   // lane l % kCopyRows: the row that this warp copies next
  int32_t score_index;  // lane l % kWarpKeys: the key of which this warp has the scores next
  uint32_t query[C::kSteps][4];
  float output[C::kHeadTiles][8][4];
  float maximum[C::kOwnRows], total[C::kOwnRows];
  float half_scale[C::kOwnRows];  // of scores whose queries became fp16

  static constexpr int kCopyRows = C::kKeys / kWarps;

  // ---- loading

  __device__ __forceinline__ int32_t index_at(int tile, int key) const {
    const int position = tile * C::kKeys + key;
    if (tile >= end_tile || position >= p.width) return -1;
    const int32_t index = __ldg(indices + position);
#ifdef GLM53_DEBUG
    if (index >= p.kv.rows) __trap();
#endif
    return index;
  }

  __device__ __forceinline__ int32_t index_of_copy(int tile) const {
    return index_at(tile, warp * kCopyRows + lane % kCopyRows);
  }

  __device__ __forceinline__ int32_t index_of_score(int tile) const {
    return index_at(tile, key_group * C::kWarpKeys + lane % C::kWarpKeys);
  }

  // Starts the copies of this warp's rows of a tile, and closes their group. Lane i works out where
  // row i lies; all lanes copy 16 bytes of each. Beyond the last tile there is only the group:
  // groups are counted, so every tile has one. No branch for that: the copies are to run into the
  // scores.
  __device__ __forceinline__ void copy_tile(int slot, int32_t index, bool is_tile = true) const {
    const uint32_t page = __umulhi(index, p.kv.page_factor) >> p.kv.page_shift;
    const int64_t offset = index * p.kv.row_bytes + static_cast<int64_t>(page) * p.kv.page_gap;
    const uint64_t place = reinterpret_cast<uint64_t>(p.kv.base) + (index < 0 ? 0 : offset);
    const uint32_t valid = __ballot_sync(~0u, index >= 0);
    const uint32_t rows =
        shared_address(ring) + slot * C::kTileBytes + warp * kCopyRows * C::kRowBytes;
    const uint32_t self = fresh(lane);
    const uint32_t chunk = (self ^ (warp * kCopyRows & 7)) << 4;
#pragma unroll
    for (int i = 0; i < kCopyRows; ++i) {
      const uint64_t source = __shfl_sync(~0u, place, i) + self * 16;
      const uint32_t target = rows + i * C::kRowBytes + (chunk ^ (i << 4));
#pragma unroll
      for (int part = 0; part < C::kRowBytes; part += 512)
        copy_async_16(target + part, reinterpret_cast<const void*>(source + part),
                      (valid >> i & 1) * 16, is_tile);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void load_ahead(int tile, int slot) {
    copy_tile(slot == 0 ? C::kStages - 1 : slot - 1, copy_index, tile + C::kStages - 1 < end_tile);
    copy_index = index_of_copy(tile + C::kStages);
  }

  __device__ __forceinline__ void load_queries_and_first_tiles(int token) {
    int32_t ahead[C::kEarlyTiles + 1];  // one more: the array must not be empty
#pragma unroll
    for (int i = 0; i < C::kEarlyTiles; ++i) ahead[i] = index_of_copy(first_tile + i);
    copy_queries(token);
#pragma unroll
    for (int i = 0; i < C::kEarlyTiles; ++i) copy_tile(i, ahead[i]);
    drop_masked_end();
    copy_async_wait<C::kEarlyTiles>();
    __syncthreads();
    read_queries();
    __syncthreads();  // the ring's end is free for tiles
#pragma unroll
    for (int i = C::kEarlyTiles; i < C::kStages - 1; ++i)
      copy_tile(i, index_of_copy(first_tile + i));
    copy_index = index_of_copy(first_tile + C::kStages - 1);
    score_index = index_of_score(first_tile);
  }

  __device__ __forceinline__ uint8_t* query_stage() const {
    return ring + C::kRingBytes - C::kQueryTiles * C::kTileBytes;
  }

  // Heads that are only padding become zeros.
  __device__ __forceinline__ void copy_queries(int token) const {
    const uint32_t stage = shared_address(query_stage());
    const __nv_bfloat16* q = p.q + token * p.q_token_stride;
#pragma unroll
    for (int i = 0; i < C::kQueryBytes / 16 / kThreads; ++i) {
      const int row = (i * kThreads + threadIdx.x) / 64, chunk = threadIdx.x % 64;
      const bool is_head = row < p.heads;
      copy_async_16(stage + row * kQueryRowBytes + ((chunk ^ (row & 7)) << 4),
                    q + (is_head ? row : 0) * p.q_head_stride + chunk * 8, is_head ? 16 : 0);
    }
    copy_async_commit();
  }

  // Moves end_tile down to the last tile with a valid index: short rows end early.
  __device__ __forceinline__ void drop_masked_end() {
    int last = -1;
    const int end = min(end_tile * C::kKeys, p.width);
    for (int i = first_tile * C::kKeys + threadIdx.x; i < end; i += kThreads)
      if (__ldg(indices + i) >= 0) last = i;
    last = __reduce_max_sync(~0u, last);
    int* found = reinterpret_cast<int*>(probabilities);
    if (lane == 0) found[warp] = last;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) last = max(last, found[i]);
    end_tile = last < 0 ? first_tile : last / C::kKeys + 1;
  }

  // Q as the tensor core's first operand.
  __device__ __forceinline__ void read_queries() {
    const uint8_t* rows = query_stage() + head_tile * 16 * kQueryRowBytes;
    if constexpr (C::kIsFp8) {
      read_queries_as_half(rows);
    } else {
      const int row = lane % 16;
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        const int chunk = (half * C::kSteps + step) * 2 + lane / 16;
        load_matrices(query[step],
                      shared_address(rows) + row * kQueryRowBytes + ((chunk ^ (row & 7)) << 4));
      }
    }
  }

  // e4m3 becomes fp16, so Q must too. A power of two for each head brings its largest value to
  // [2^14, 2^15): no overflow, and exact down to 2^-29 of the largest.
  //
  // A lane holds four neighbouring values of a key where fp16 fragments have two pairs eight apart.
  // Q takes its values in that same order, which leaves the sum as it is.
  __device__ __forceinline__ void read_queries_as_half(const uint8_t* rows) {
    float* factors = reinterpret_cast<float*>(C::kIsParked ? ring + C::kFactorsStart : inboxes);
    write_query_factors(factors);
    __syncthreads();
    const int low = lane / 4, high = low + 8;
    const float low_factor = factors[head_tile * 16 + low];
    const float high_factor = factors[head_tile * 16 + high];
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      const int chunk = (half * C::kSteps + step) * 2 + lane % 4 / 2;
      const int place = ((chunk ^ low) << 4) + lane % 2 * 8;  // high % 8 is low
      const uint2 a = *reinterpret_cast<const uint2*>(rows + low * kQueryRowBytes + place);
      const uint2 b = *reinterpret_cast<const uint2*>(rows + high * kQueryRowBytes + place);
      query[step][0] = scaled_half(a.x, low_factor);
      query[step][1] = scaled_half(b.x, high_factor);
      query[step][2] = scaled_half(a.y, low_factor);
      query[step][3] = scaled_half(b.y, high_factor);
    }
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
      half_scale[i] = p.score_scale / (half + i == 0 ? low_factor : high_factor);
  }

  __device__ __forceinline__ static uint32_t scaled_half(uint32_t bf16_pair, float factor) {
    const float2 pair = unpack<false>(bf16_pair);
    return pack<true>(pair.x * factor, pair.y * factor);
  }

  __device__ __forceinline__ void write_query_factors(float* factors) const {
    for (int row = warp; row < C::kRows; row += kWarps) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(query_stage() + row * kQueryRowBytes +
                                                        (i * 32 + lane) * 16);
        for (const uint32_t pair : {v.x, v.y, v.z, v.w})
          largest = max(largest, max(pair >> 16 & 0x7fff, pair & 0x7fff));
      }
      // The biased exponent; of tiny rows a larger one, so that the factor stays finite.
      const int exponent = max(static_cast<int>(__reduce_max_sync(~0u, largest) >> 7), 27);
      if (lane == 0) factors[row] = __int_as_float((127 + 14 - (exponent - 127)) << 23);
    }
  }

  // ---- one tile

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int m = 0; m < C::kHeadTiles; ++m)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][j][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) {
      maximum[i] = -INFINITY;
      total[i] = 0.0f;
    }
  }

  __device__ __forceinline__ uint8_t* inbox(int tile, int group, int side) const {
    return inboxes + ((tile * C::kHalves + side) * C::kKeyGroups + group) * C::kInboxBytes;
  }

  // Scores of this thread's own rows: row lane / 4 (+ 8), keys octet * 8 + lane % 4 * 2 (+ 1).
  __device__ __forceinline__ void scores(uint32_t keys, float (&s)[C::kOwnRows][C::kOctets][2]) {
    // One octet alone would be one long chain of dependent additions; several sums are added up at
    // last.
    constexpr int kChains = C::kOctets > 1 ? 1 : C::kIsFp8 ? 2 : 4;
    float sum[kChains][C::kOctets][4] = {};
    const uint32_t self = fresh(lane);
    const uint32_t row =
        keys + (key_group * C::kWarpKeys + self % 8) * C::kRowBytes + half * (C::kRowBytes / 2);
    const uint32_t first = ((self / 8) ^ (self % 8)) << 4;
    constexpr int kLoads = C::kRowBytes / C::kHalves / 64;  // of 64 bytes of eight keys each
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const uint32_t place = row + load / 2 * 128 + (first ^ (load % 2 * 64));
#pragma unroll
      for (int octet = 0; octet < C::kOctets; ++octet) {
        uint32_t b[4];
        load_matrices(b, place + octet * 8 * C::kRowBytes);
        if constexpr (C::kIsFp8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t low, high;
            widen_e4m3(b[i], low, high);
            multiply_add<true>(sum[i % kChains][octet], query[load * 4 + i], low, high);
          }
        } else {
          multiply_add<false>(sum[load * 2 % kChains][octet], query[load * 2], b[0], b[1]);
          multiply_add<false>(sum[(load * 2 + 1) % kChains][octet], query[load * 2 + 1], b[2],
                              b[3]);
        }
      }
    }
#pragma unroll
    for (int octet = 0; octet < C::kOctets; ++octet) {
      float whole[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        whole[i] = sum[0][octet][i];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) whole[i] += sum[chain][octet][i];
      }
      if constexpr (C::kHalves == 1) {
        s[0][octet][0] = whole[0];
        s[0][octet][1] = whole[1];
        s[1][octet][0] = whole[2];
        s[1][octet][1] = whole[3];
      } else {
        // Half 0 keeps rows 0..7 and sends rows 8..15, half 1 the other way round.
        s[0][octet][0] = half == 0 ? whole[0] : whole[2];
        s[0][octet][1] = half == 0 ? whole[1] : whole[3];
        float2* sent = reinterpret_cast<float2*>(inbox(head_tile, key_group, 1 - half));
        sent[octet * 32 + self] =
            half == 0 ? make_float2(whole[2], whole[3]) : make_float2(whole[0], whole[1]);
      }
    }
    if constexpr (C::kHalves == 2) {
      barrier(1 + head_tile * C::kKeyGroups + key_group, 64);
      const float2* received = reinterpret_cast<const float2*>(inbox(head_tile, key_group, half));
#pragma unroll
      for (int octet = 0; octet < C::kOctets; ++octet) {
        const float2 other = received[octet * 32 + self];
        s[0][octet][0] += other.x;
        s[0][octet][1] += other.y;
      }
      __syncwarp();  // the inbox is read, and takes maxima next
    }
  }

  __device__ __forceinline__ float score_scale(int i, uint32_t self) const {
    if constexpr (!C::kIsFp8) return p.score_scale;
    if constexpr (!C::kIsParked) return half_scale[i];
    return p.score_scale / reinterpret_cast<const float*>(
                               ring + C::kFactorsStart)[head_tile * 16 + own_row(i, self)];
  }

  // Row of the head tile of a thread's own row i.
  __device__ __forceinline__ int own_row(int i, uint32_t self) const {
    return (C::kHalves == 2 ? half : i) * 8 + self / 4;
  }

  __device__ __forceinline__ void softmax(uint32_t valid, float (&s)[C::kOwnRows][C::kOctets][2]) {
    const uint32_t self = fresh(lane);
    float largest[C::kOwnRows];
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) {
      largest[i] = -INFINITY;
#pragma unroll
      for (int octet = 0; octet < C::kOctets; ++octet)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = octet * 8 + self % 4 * 2 + j;
          if (!(valid >> key & 1)) s[i][octet][j] = -INFINITY;
          largest[i] = fmaxf(largest[i], s[i][octet][j]);
        }
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], 2));
    }
    if constexpr (C::kKeyGroups > 1) share_maxima(largest, self);

    uint8_t* tile = probabilities + head_tile * 16 * C::kProbabilityRowBytes;
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) {
      const float scale = score_scale(i, self);
      const float next = fmaxf(maximum[i], largest[i] * scale);
      const float subtracted = finite_or_zero(next);
      const float factor = exp2_fast(maximum[i] - subtracted);
      maximum[i] = next;
      total[i] *= factor;
      const int row = own_row(i, self);
#pragma unroll
      for (int octet = 0; octet < C::kOctets; ++octet) {
        const float first = exp2_fast(fmaf(s[i][octet][0], scale, -subtracted));
        const float second = exp2_fast(fmaf(s[i][octet][1], scale, -subtracted));
        const uint32_t pair = pack<C::kIsFp8>(first, second);
        total[i] += first + second;
        const int chunk = probability_chunk(row, key_group * C::kOctets + octet);
        *reinterpret_cast<uint32_t*>(tile + row * C::kProbabilityRowBytes + chunk * 16 +
                                     self % 4 * 4) = pair;
      }
      if (key_group == 0 && self % 4 == 0) *factor_of(head_tile, row) = factor;
    }
  }

  __device__ __forceinline__ static int probability_chunk(int row, int chunk) {
    return C::kProbabilityRowBytes == 64 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7);
  }

  __device__ __forceinline__ float* factor_of(int tile, int row) const {
    const int side = C::kHalves == 2 ? row / 8 : 0;
    return reinterpret_cast<float*>(inbox(tile, 0, side) + C::kFactorOffset) +
           (C::kHalves == 2 ? row % 8 : row);
  }

  // Row maxima over all key groups; only the warps that share the rows meet.
  __device__ __forceinline__ void share_maxima(float (&largest)[C::kOwnRows], uint32_t self) {
    float* own = reinterpret_cast<float*>(inbox(head_tile, key_group, half));
    if (self % 4 == 0) {
#pragma unroll
      for (int i = 0; i < C::kOwnRows; ++i) own[i * 8 + self / 4] = largest[i];
    }
    barrier(5 + head_tile * C::kHalves + half, C::kKeyGroups * 32);
#pragma unroll
    for (int group = 0; group < C::kKeyGroups; ++group) {
      const float* other = reinterpret_cast<const float*>(inbox(head_tile, group, half));
#pragma unroll
      for (int i = 0; i < C::kOwnRows; ++i) largest[i] = fmaxf(largest[i], other[i * 8 + self / 4]);
    }
  }

  __device__ __forceinline__ void rescale() {
    const uint32_t row = fresh(lane) / 4;
#pragma unroll
    for (int m = 0; m < C::kHeadTiles; ++m) {
      const float low = *factor_of(m, row), high = *factor_of(m, row + 8);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        output[m][j][0] *= low;
        output[m][j][1] *= low;
        output[m][j][2] *= high;
        output[m][j][3] *= high;
      }
    }
  }

  __device__ __forceinline__ void accumulate(uint32_t keys) {
    const uint32_t self = fresh(lane);
    const uint32_t row = keys + (self / 8 % 2 * 8 + self % 8) * C::kRowBytes;
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) {
      uint32_t a[C::kHeadTiles][4];
#pragma unroll
      for (int m = 0; m < C::kHeadTiles; ++m) {
        const uint32_t head = self % 16;
        load_matrices(a[m], shared_address(probabilities) +
                                (m * 16 + head) * C::kProbabilityRowBytes +
                                probability_chunk(head, k * 2 + self / 16) * 16);
      }
      if constexpr (C::kIsFp8)
        accumulate_e4m3(row + k * 16 * C::kRowBytes, self, a);
      else
        accumulate_bf16(row + k * 16 * C::kRowBytes, self, a);
    }
  }

  __device__ __forceinline__ void accumulate_bf16(uint32_t row, uint32_t self,
                                                  const uint32_t (&a)[C::kHeadTiles][4]) {
    const uint32_t first = ((self / 16) ^ (self % 8)) << 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t b[4];
      load_matrices_transposed(b, row + warp * 128 + (first ^ (j << 5)));
#pragma unroll
      for (int m = 0; m < C::kHeadTiles; ++m) {
        multiply_add<false>(output[m][2 * j], a[m], b[0], b[1]);
        multiply_add<false>(output[m][2 * j + 1], a[m], b[2], b[3]);
      }
    }
  }

  // The transposed load moves pairs of bytes, columns 2n and 2n + 1 of a key. Two keys' pairs are
  // widened and sorted into even and odd columns: output[2i] has the even ones of 16, output[2i +
  // 1] the odd ones.
  __device__ __forceinline__ void accumulate_e4m3(uint32_t row, uint32_t self,
                                                  const uint32_t (&a)[C::kHeadTiles][4]) {
    const uint32_t first = ((warp % 2 * 4 + self / 16) ^ (self % 8)) << 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t b[4];
      load_matrices_transposed(b, row + warp / 2 * 128 + (first ^ (j << 5)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t key0, key1, key8, key9;
        widen_e4m3(b[2 * i], key0, key1);
        widen_e4m3(b[2 * i + 1], key8, key9);
        const uint32_t even0 = __byte_perm(key0, key1, 0x5410);
        const uint32_t even8 = __byte_perm(key8, key9, 0x5410);
        const uint32_t odd0 = __byte_perm(key0, key1, 0x7632);
        const uint32_t odd8 = __byte_perm(key8, key9, 0x7632);
#pragma unroll
        for (int m = 0; m < C::kHeadTiles; ++m) {
          multiply_add<true>(output[m][4 * j + 2 * i], a[m], even0, even8);
          multiply_add<true>(output[m][4 * j + 2 * i + 1], a[m], odd0, odd8);
        }
      }
    }
  }

  // ---- the end

  // Sums of probabilities [key group, row] and maxima [row], where the ring was.
  __device__ __forceinline__ void share_totals() {
    float* totals = reinterpret_cast<float*>(ring);
    float* maxima = totals + C::kKeyGroups * C::kRows;
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) {
      float sum = total[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = head_tile * 16 + own_row(i, lane);
      if (lane % 4 == 0) {
        totals[key_group * C::kRows + row] = sum;
        if (key_group == 0) maxima[row] = maximum[i];
      }
    }
    __syncthreads();
  }

  // Calls visit(row, its head tile's output, place of the row in it, total, log2 of the sum of
  // exponentials) for this thread's rows that are heads. A total of zero: every key was masked.
  template <typename Visit>
  __device__ __forceinline__ void for_rows(Visit visit) const {
    const float* totals = reinterpret_cast<const float*>(ring);
    const float* maxima = totals + C::kKeyGroups * C::kRows;
#pragma unroll
    for (int m = 0; m < C::kHeadTiles; ++m)
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int row = m * 16 + side * 8 + lane / 4;
        if (row >= p.heads) continue;
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < C::kKeyGroups; ++group) sum += totals[group * C::kRows + row];
        visit(row, output[m], side * 2, sum, sum == 0.0f ? -INFINITY : maxima[row] + log2f(sum));
      }
  }

  // Calls store(column, four values), or (column, two values) for bf16 whose layout has no more.
  template <typename Store>
  __device__ __forceinline__ void for_columns(const float (&o)[8][4], int at, float factor,
                                              Store store) const {
    if constexpr (C::kIsFp8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = warp * kColumns + i * 16 + lane % 4 * 4;
        store(column, o[2 * i][at] * factor, o[2 * i + 1][at] * factor);
        store(column + 2, o[2 * i][at + 1] * factor, o[2 * i + 1][at + 1] * factor);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        store(warp * kColumns + j * 8 + lane % 4 * 2, o[j][at] * factor, o[j][at + 1] * factor);
    }
  }

  __device__ __forceinline__ void store_whole(int token, int row, const float (&o)[8][4], int at,
                                              float factor, float lse) const {
    __nv_bfloat16* out = p.out + token * p.out_token_stride + row * p.out_head_stride;
    for_columns(o, at, factor, [out](int column, float a, float b) {
      *reinterpret_cast<uint32_t*>(out + column) = pack<false>(a, b);
    });
    if (p.lse != nullptr && warp == 0 && lane % 4 == 0)
      p.lse[static_cast<int64_t>(token) * p.heads + row] = lse * kLn2;
  }

  __device__ __forceinline__ void store_part(int slot, int row, const float (&o)[8][4], int at,
                                             float factor, float lse) const {
    const int64_t place = static_cast<int64_t>(slot) * p.rows + row;
    float* out = p.part_out + place * kWidth;
    for_columns(o, at, factor, [out](int column, float a, float b) {
      *reinterpret_cast<float2*>(out + column) = make_float2(a, b);
    });
    if (warp == 0 && lane % 4 == 0) p.part_lse[place] = lse;
  }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) forward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Block<C> block(p, shared);
  const Schedule& plan = p.plan;
  const int self = static_cast<int>(blockIdx.x);
  auto* parked = reinterpret_cast<volatile Position*>(shared + C::kInboxesEnd);
  Position at = first_position(plan, self);
  while (at < plan.whole_tokens * plan.splits) {
    if (C::kIsParked) *parked = at;  // every thread writes the same, and reads what it wrote
    block.attend(range_at(plan, self, at));
    // A new value to the compiler, so that nothing derived from the old one is kept through attend.
    at = C::kIsParked ? *parked : at + plan.zero;
    block.finish(range_at(plan, self, at).token, slot_at(plan, self, at));
    at = next_position(plan, self, static_cast<int>(gridDim.x), at);
  }
}

}  // namespace glm53
