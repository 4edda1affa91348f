// Shapes of the kernels: how the eight warps of a block share the work, and what lies where in
// shared memory.
//
// A block handles one token with all of its heads, padded to a multiple of 16, and walks over its
// keys in tiles. Scores and output are shared out differently:
//
//   scores [heads, keys of the tile]: a warp has one head tile (16 heads), one key group and, where
//     kHalves is 2, one half of the 512 values, whose two partial sums are exchanged. So no warp
//     holds more of Q than 128 registers, and Q is never read again.
//   output [heads, 512]: a warp has 64 of the 512 columns for all heads, in 32 registers a head
//   tile.
//
// Shared memory is a ring of tiles, then P (the probabilities of one tile, as the tensor cores read
// them), then an inbox for each warp. sm_120 and sm_121 give a block 101,376 bytes, and one block a
// multiprocessor; three tiles of 32 KiB and 3 KiB are exactly that.
#pragma once

#include <cstddef>

#include "glm53_sparse_mla.h"

namespace glm53 {

constexpr int kWidth = GLM53_SPARSE_MLA_WIDTH;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kColumns = kWidth / kWarps;  // of the output, for one warp
constexpr int kQueryRowBytes = kWidth * 2;

// Named in the compiler's error with the number found, where it is too large.
template <int kBytes>
struct SharedMemory {
  static_assert(kBytes <= GLM53_SPARSE_MLA_MAX_SHARED,
                "a block needs more shared memory than sm_120 and sm_121 have (101,376 bytes)");
  static constexpr int bytes = kBytes;
};

template <bool kIsFp8_, int kHeadTiles_, int kHalves_, int kKeys_, int kStages_>
struct Config {
  static constexpr bool kIsFp8 = kIsFp8_;
  static constexpr int kHeadTiles = kHeadTiles_;
  static constexpr int kHalves = kHalves_;
  static constexpr int kKeys = kKeys_;      // of a tile
  static constexpr int kStages = kStages_;  // tiles in the ring; one is computed on, the rest load

  static constexpr int kRows = kHeadTiles * 16;
  static constexpr int kKeyGroups = kWarps / (kHeadTiles * kHalves);
  static constexpr int kWarpKeys = kKeys / kKeyGroups;
  static constexpr int kOctets = kWarpKeys / 8;         // the tensor core takes keys by eight
  static constexpr int kOwnRows = 2 / kHalves;          // rows whose softmax a thread does
  static constexpr int kSteps = kWidth / kHalves / 16;  // of 16 values, for a warp's scores

  static constexpr int kRowBytes = kWidth * (kIsFp8 ? 1 : 2);
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kRingBytes = kStages * kTileBytes;

  static constexpr int kProbabilityRowBytes = kKeys * 2;
  static constexpr int kProbabilityBytes = kRows * kProbabilityRowBytes;

  // An inbox takes the other half's scores. Once read, its first 64 bytes hold row maxima and the
  // next 64 the factors that rescale the output.
  static constexpr int kInboxBytes = kHalves == 2 ? 256 * kOctets : 128;
  static constexpr int kFactorOffset = 64;

  static constexpr int kInboxesEnd = kRingBytes + kProbabilityBytes + kWarps * kInboxBytes;

  // 64 heads need every register, and leave room in shared memory: there the block's position
  // waits, and the factors by which fp8 scales its queries.
  static constexpr bool kIsParked = kHeadTiles == 4;
  static constexpr int kFactorsStart = kInboxesEnd + 16;
  static constexpr int kSharedBytes = kIsParked ? kFactorsStart + kRows * 4 : kInboxesEnd;

  // Q passes through the end of the ring on its way to registers, so fewer tiles can load
  // meanwhile.
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr int kQueryTiles = (kQueryBytes + kTileBytes - 1) / kTileBytes;
  static constexpr int kEarlyTiles =
      kStages - kQueryTiles < kStages - 1 ? kStages - kQueryTiles : kStages - 1;

  static_assert(kHeadTiles * kHalves * kKeyGroups == kWarps);
  static_assert(kWarpKeys % 8 == 0 && kKeys % 16 == 0 && kKeys % kWarps == 0);
  static_assert(kStages >= 2 && kEarlyTiles >= 0);
  static_assert(SharedMemory<kSharedBytes>::bytes > 0);
};

// Stages are what fits. A wider fp8 tile has the bytes of a bf16 one and pays half the barriers a
// key. 64 heads leave room for two bf16 tiles; they are bound by arithmetic, so two are enough.
//                           fp8   head tiles  halves  keys  stages
using Bf16Heads16 = Config<false, 1, 2, 32, 3>;
using Bf16Heads32 = Config<false, 2, 1, 32, 3>;
using Bf16Heads64 = Config<false, 4, 2, 32, 2>;
using Fp8Heads16 = Config<true, 1, 1, 64, 3>;
using Fp8Heads32 = Config<true, 2, 1, 32, 6>;
using Fp8Heads64 = Config<true, 4, 2, 32, 5>;

}  // namespace glm53
