// Which block handles which keys of which token. The host plans, each block reads its share off.
//
// Tokens come in two regions:
//
//   whole: the first whole_tokens, in `splits` equal ranges each. Item i of all tokens * splits
//   goes to
//     block i % blocks. Automatic mode has splits 1 here and as many tokens as fill the GPU evenly.
//   spread (automatic mode only): the tokens left over, too few to fill the GPU. Their tiles, one
//     token after the other, are cut into periods, and each period into chunks of equal length.
//     Block c takes chunk c. With one period of all tokens every block has the same number of
//     tiles, whatever the number of tokens (known as stream-K). With a period a token, chunks end
//     where tokens end: fewer parts, for numbers of tokens with which that wastes little.
//
// A token in more than one range is combined from partial results in slots of the workspace. A
// chunk is no longer than a token, so it reaches into two tokens at most and has two slots.
#pragma once

#include <cstdint>

namespace glm53 {

struct Schedule {
  int32_t tokens;
  int32_t whole_tokens;
  int32_t splits;
  int32_t split_tiles;  // the first long_splits of a token have one more
  int32_t long_splits;
  int32_t chunks;
  int32_t period_tiles;
  int32_t period_chunks;
  int32_t chunk_tiles;  // the first long_chunks of a period have one more
  int32_t long_chunks;
  int32_t tiles;      // of a token, by which the work is shared out
  int32_t all_tiles;  // the last range of a token reaches to the end of its indices
  int32_t zero;       // zero, which the compiler does not know
};

// Where a block stands: item `at`, or, below zero, tile ~at of its chunk, counted over all spread
// tokens. One number, because the kernel has no register to spare.
using Position = int32_t;

// A run of tiles of one token.
struct Range {
  int32_t token;
  int32_t begin;
  int32_t end;
};

// Where the parts of a token lie: part 0 in `first`, part i > 0 in `base + i * stride`. Of a token
// with one part there is no slot.
struct Slots {
  int32_t first;
  int32_t base;
  int32_t stride;
  int32_t parts;

  __host__ __device__ int32_t at(int32_t part) const {
    return part == 0 ? first : base + part * stride;
  }
};

// Tokens before it are whole: every token from here on may have several parts.
__host__ __device__ inline int32_t first_split_token(const Schedule& plan) {
  return plan.splits == 1 ? plan.whole_tokens : 0;
}

// Where piece i of a run of tiles starts, when the first `longer` pieces have one tile more.
__host__ __device__ inline int32_t piece_begin(int32_t i, int32_t tiles, int32_t longer) {
  return i * tiles + (i < longer ? i : longer);
}

__host__ __device__ inline int32_t chunk_begin(const Schedule& plan, int32_t chunk) {
  const int32_t period = chunk / plan.period_chunks;
  return period * plan.period_tiles +
         piece_begin(chunk - period * plan.period_chunks, plan.chunk_tiles, plan.long_chunks);
}

__host__ __device__ inline int32_t chunk_of(const Schedule& plan, int32_t tile) {
  const int32_t period = tile / plan.period_tiles;
  const int32_t rest = tile - period * plan.period_tiles;
  const int32_t in_long = plan.long_chunks * (plan.chunk_tiles + 1);
  const int32_t chunk = rest < in_long ? rest / (plan.chunk_tiles + 1)
                                       : plan.long_chunks + (rest - in_long) / plan.chunk_tiles;
  return period * plan.period_chunks + chunk;
}

__host__ __device__ inline Slots slots_of(const Schedule& plan, int32_t token) {
  if (token < plan.whole_tokens) return {token * plan.splits, token * plan.splits, 1, plan.splits};
  const int32_t begin = (token - plan.whole_tokens) * plan.tiles;
  const int32_t first = chunk_of(plan, begin);
  const int32_t last = chunk_of(plan, begin + plan.tiles - 1);
  const int32_t is_second = chunk_begin(plan, first) < begin ? 1 : 0;
  return {2 * first + is_second, 2 * first, 2, last - first + 1};
}

// Where block `block` starts; at or beyond the number of items where it has nothing to do.
__host__ __device__ inline Position first_position(const Schedule& plan, int32_t block) {
  return block < plan.chunks ? ~chunk_begin(plan, block) : block;
}

__host__ __device__ inline Position next_position(const Schedule& plan, int32_t block,
                                                  int32_t blocks, Position at) {
  if (at >= 0) return at + blocks;
  const int32_t next_token = (~at / plan.tiles + 1) * plan.tiles;
  return next_token < chunk_begin(plan, block + 1) ? ~next_token : block;
}

__host__ __device__ inline Range range_at(const Schedule& plan, int32_t block, Position at) {
  if (at < 0) {
    const int32_t token = ~at / plan.tiles, origin = token * plan.tiles;
    const int32_t end = chunk_begin(plan, block + 1) - origin;
    return {plan.whole_tokens + token, ~at - origin, end < plan.tiles ? end : plan.all_tiles};
  }
  const int32_t split = at % plan.splits;
  return {at / plan.splits, piece_begin(split, plan.split_tiles, plan.long_splits),
          split + 1 == plan.splits ? plan.all_tiles
                                   : piece_begin(split + 1, plan.split_tiles, plan.long_splits)};
}

__host__ __device__ inline int32_t slot_at(const Schedule& plan, int32_t block, Position at) {
  if (at >= 0) return at;
  return 2 * block + (~at > chunk_begin(plan, block) ? 1 : 0);
}

}  // namespace glm53
