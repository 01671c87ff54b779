// A tile of 128x128 codes in shared memory, written by rows and read by columns, and how a block of threads does both.
#pragma once
#include "common.cuh"

constexpr int TILE = 128;

constexpr int TILE_THREADS = 256;
constexpr int TILE_WARPS = TILE_THREADS / 32;

// Shared memory of a block.
struct Tile {
  // Row-major, eight packs of 16 codes to a row, rotated by `place`, so that neither writes nor reads have bank conflicts.
  uint4 codes[TILE * TILE / 16];
  // Of each warp's rows.
  float sums[TILE_WARPS][TILE];

  // Where pack `pack` of a row lies.
  static __device__ __forceinline__ int place(int row, int pack) { return row * 8 + ((pack + row / 16) & 7); }
};

// Writes the columns of the tile at (row0, col0) to the rows of `out`, [cols, pitch]. A thread turns 16 rows of four columns with
// byte permutations, and eight of them write the 128 codes of a column. pitch is a multiple of 16, and codes from row `pitch` on
// are left out.
__device__ __forceinline__ void write_turned(const Tile& tile, uint8_t* out, uint32_t row0, uint32_t col0, uint32_t pitch,
                                             uint32_t cols) {
  const int pack = threadIdx.x / 32, word = threadIdx.x % 32 / 8, part = threadIdx.x % 8;
  const uint32_t col = col0 + pack * 16 + word * 4, out_row = row0 + part * 16;
  if (col >= cols || out_row >= pitch) return;
  uint32_t columns[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t rows[4];
#pragma unroll
    for (int r = 0; r < 4; r++)
      rows[r] = reinterpret_cast<const uint32_t*>(tile.codes + Tile::place(part * 16 + 4 * i + r, pack))[word];
    // Byte c of each word goes to column c.
    const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
    const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362), high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0][i] = __byte_perm(low01, low23, 0x5410), columns[1][i] = __byte_perm(low01, low23, 0x7632);
    columns[2][i] = __byte_perm(high01, high23, 0x5410), columns[3][i] = __byte_perm(high01, high23, 0x7632);
  }
  uint8_t* to = out + (uint64_t)col * pitch + out_row;
#pragma unroll
  for (int c = 0; c < 4; c++)
    if (col + c < cols)
      *reinterpret_cast<uint4*>(to + c * (uint64_t)pitch) =
          make_uint4(columns[c][0], columns[c][1], columns[c][2], columns[c][3]);
}
