// The host's side of schedule.cuh: how a call is shared out, and the workspace that it needs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "glm53_sparse_mla.h"
#include "schedule.cuh"

namespace glm53 {

// Measured on an H200 (2026-11-29, CUDA graphs, cold KV, 16 heads, 2,048 keys).
//
// With more parts than kFewParts, several groups of threads read them: 32 parts of one token are
// joined in 2 us less, 2 parts of 64 tokens in 10 us more.
constexpr int kFewParts = 8;
// A chunk has at least this many tiles. With one, a single token takes 10.7 us instead of 10.1: its
// twice as many parts cost more to join than half the tiles save.
constexpr int kLeastTiles = 2;
// What it costs a block to start on a second token. With 1, 256 tokens of bf16 take 155 us, not
// 141.
constexpr int kTilesOfASecondStart = 3;
struct Plan {
  Schedule schedule;
  int32_t blocks;
  int32_t parts;  // of the token with the most
};

inline int32_t padded_rows(int32_t heads) { return heads <= 16 ? 16 : heads <= 32 ? 32 : 64; }

inline int32_t tiles_of(int64_t width, int32_t keys) {
  return static_cast<int32_t>(std::max<int64_t>(1, (width + keys - 1) / keys));
}

inline void cut_into_chunks(Schedule& schedule, int32_t period_tiles, int32_t period_chunks) {
  schedule.period_tiles = period_tiles;
  schedule.period_chunks = period_chunks;
  schedule.chunk_tiles = period_tiles / period_chunks;
  schedule.long_chunks = period_tiles % period_chunks;
}

// Automatic mode: whole tokens fill the GPU as often as they can, the rest is spread.
inline Plan plan_spread(Schedule schedule, int32_t sm_count) {
  const int32_t blocks = sm_count, rest = schedule.tokens % blocks, tiles = schedule.tiles;
  const int64_t all = static_cast<int64_t>(rest) * tiles;
  if (rest == 0 || all >= (1 << 30)) {  // positions are 32-bit numbers
    schedule.whole_tokens = schedule.tokens;
    return {schedule, std::min(blocks, schedule.tokens), 1};
  }
  schedule.whole_tokens = schedule.tokens - rest;
  // Tiles that the busiest block has, one way and the other.
  const int32_t parts = std::clamp(blocks / rest, 1, std::max(1, tiles / kLeastTiles));
  const int32_t aligned = (tiles + parts - 1) / parts;
  const auto wanted = static_cast<int32_t>(std::min<int64_t>(blocks, all / kLeastTiles));
  const int32_t even = std::max(wanted, rest);
  if (aligned <= (all + even - 1) / even + kTilesOfASecondStart) {
    schedule.chunks = rest * parts;
    cut_into_chunks(schedule, tiles, parts);
  } else {
    schedule.chunks = even;
    cut_into_chunks(schedule, static_cast<int32_t>(all), even);
  }
  int32_t most = 1;
  for (int32_t token = schedule.whole_tokens; token < schedule.tokens; ++token)
    most = std::max(most, slots_of(schedule, token).parts);
  const int32_t used = schedule.whole_tokens ? blocks : schedule.chunks;
  return {schedule, used, most};
}

inline Plan make_plan(int32_t tokens, int32_t width, int32_t expected_width, int32_t splits,
                      int32_t keys, int32_t sm_count) {
  Schedule schedule{};
  schedule.tokens = tokens;
  schedule.all_tiles = tiles_of(width, keys);
  schedule.tiles =
      tiles_of(expected_width && expected_width < width ? expected_width : width, keys);
  schedule.splits = std::max(splits, 1);
  schedule.split_tiles = schedule.tiles / schedule.splits;
  schedule.long_splits = schedule.tiles % schedule.splits;
  if (splits == 0) return plan_spread(schedule, sm_count);
  schedule.whole_tokens = tokens;
  const int64_t items = static_cast<int64_t>(tokens) * splits;
  return {schedule, static_cast<int32_t>(std::min<int64_t>(sm_count, items)), splits};
}

// Slots that a workspace must have for up to `tokens` tokens.
inline int64_t slot_count(int64_t tokens, int32_t splits, int32_t sm_count) {
  if (splits == 1) return 0;
  return splits == 0 ? int64_t{2} * sm_count : tokens * splits;
}

inline uint64_t workspace_size(int64_t slots, int32_t rows) {
  const uint64_t numbers = static_cast<uint64_t>(slots) * rows;
  return numbers * 4 + numbers * GLM53_SPARSE_MLA_WIDTH * 4;
}

}  // namespace glm53
