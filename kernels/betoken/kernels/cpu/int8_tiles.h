// Integer sums of blocks by tile registers (AMX-INT8): sixteen rows times 32 columns at a time.
#pragma once
#include "int8_codes.h"

namespace betoken {

template <int LAYOUT, int BLOCK>
class ByteTiles;

}  // namespace betoken

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(BETOKEN_BYTE_DOTS)
#define BETOKEN_BYTE_TILES

namespace betoken {

// Tiles 0 to 3 are sums of two blocks by two halves of the columns, 4 and 5 rows of x, 6 and 7 codes.
template <int LAYOUT, int BLOCK>
class ByteTiles {
 public:
  ByteTiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = tile == 4 || tile == 5 ? BLOCK : 64;
      config.rows[tile] = tile < 6 ? kByteTileRows : BLOCK / 4;
    }
    _tile_loadconfig(&config);
  }
  ~ByteTiles() { _tile_release(); }

  // The codes of [from, end) of K.
  void decode(const GroupedColumns& columns, int64_t from, int64_t end) {
    for (int64_t k = from; k < end; k += kStep)
      for (int lane = 0; lane < kColumns; lane += kNative) {
        const ByteCodes<LAYOUT> codes(columns.codes(k), lane);
        for (int i = 0; i < kFours; ++i)
          std::memcpy(&codes_[(k - from) / kStep][lane / 16][i][lane % 16 * 4], &codes.fours[i], sizeof codes.fours[i]);
      }
  }

  // Multiply sixteen rows of x by the codes of a decoded step.
  void multiply(int step, const int8_t* x) {
    const auto& codes = codes_[step];
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x, kRowBlockInputs);
    _tile_loadd(6, codes[0], 64);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, codes[1], 64);
    _tile_dpbsud(1, 4, 7);
    if constexpr (BLOCK == 16) {
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(5, x + BLOCK, kRowBlockInputs);
      _tile_loadd(6, codes[0][BLOCK / 4], 64);
      _tile_dpbsud(2, 5, 6);
      _tile_loadd(7, codes[1][BLOCK / 4], 64);
      _tile_dpbsud(3, 5, 7);
      _tile_stored(2, &sums_[1][0][0], kColumns * 4);
      _tile_stored(3, &sums_[1][0][16], kColumns * 4);
    }
    _tile_stored(0, &sums_[0][0][0], kColumns * 4);
    _tile_stored(1, &sums_[0][0][16], kColumns * 4);
  }

  NativeInts sum(int part, int64_t row, int lane) const {
    NativeInts sum;
    std::memcpy(&sum, &sums_[part][row][lane], sizeof sum);
    return sum;
  }

 private:
  alignas(64) uint8_t codes_[kDepthChunk / kStep][kColumns / 16][kFours][64];
  alignas(64) int32_t sums_[kStep / BLOCK][kByteTileRows][kColumns];
};

}  // namespace betoken
#endif
