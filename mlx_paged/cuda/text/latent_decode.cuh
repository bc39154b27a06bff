// Products of tiles in shared memory by a warpgroup of four warps. A tile has rows of 64 16-bit values. Eighth e of row n
// is stored in place e ^ (n % 8), so that the values of a column lie in different banks.
// Accumulators of 64 rows and N columns: [j][e] of lane 4r + c, warp w is row 16w + r + 8 (e / 2), column 8j + 2c + e %
// 2.

// Return where the values of an eighth of a row begin.
__device__ inline int swizzled(int row, int eighth) { return row * 64 + (eighth ^ row % 8) * 8; }

// d = A B^T, or d += if GOES_ON: 64 rows of A and 8 J rows of B, each in TILES tiles, a_apart and b_apart values apart.
template <int TILES, bool GOES_ON, class T, int J>
__device__ inline void multiply_rows(float (&d)[J][4], const T* a, int a_apart, const T* b, int b_apart, int lane, int warp) {
  UNROLL
  for (int i = 0; i < J * 4; i++) d[i / 4][i % 4] = GOES_ON ? d[i / 4][i % 4] : 0.0f;
  const int a_row = warp * 16 + lane % 16, b_row = lane / 16 * 8 + lane % 8;
  for (int k = 0; k < TILES * 4; k++) {
    const uint4 x = load_matrices(a + k / 4 * a_apart + swizzled(a_row, k % 4 * 2 + lane / 16));
    UNROLL
    for (int j = 0; j < J; j += 2) {
      const uint4 y = load_matrices(b + k / 4 * b_apart + swizzled(j * 8 + b_row, k % 4 * 2 + lane / 8 % 2));
      mma<T>(d[j], x.x, x.y, x.z, x.w, y.x, y.y);
      mma<T>(d[j + 1], x.x, x.y, x.z, x.w, y.z, y.w);
    }
  }
}

// d += A B: the first DEPTH columns of a tile A of 64 rows, and DEPTH rows of B in tiles of 64 columns, b_apart apart.
template <int DEPTH, class T, int J>
__device__ inline void multiply_columns(float (&d)[J][4], const T* a, const T* b, int b_apart, int lane, int warp) {
  const int row = warp * 16 + lane % 16;
#pragma unroll 1  // unrolled, it would spill registers
  for (int k = 0; k < DEPTH / 16; k++) {
    const uint4 x = load_matrices(a + swizzled(row, k * 2 + lane / 16));
    UNROLL
    for (int j = 0; j < J; j += 2) {
      const uint4 y = load_transposed(b + j / 8 * b_apart + swizzled(k * 16 + lane % 16, j % 8 + lane / 16));
      mma<T>(d[j], x.x, x.y, x.z, x.w, y.x, y.y);
      mma<T>(d[j + 1], x.x, x.y, x.z, x.w, y.z, y.w);
    }
  }
}

#pragma kernel
// CUDA only: latent_decode for 16-bit types on the tensor cores. A thread group handles one row, up to 64 of its query
// heads and a partition of 2^params[3] tokens. It reads each token once, as a key of D values and as a value, the first
// DV of them.
// Two warpgroups compute and a third one copies. Tokens come in tiles of KEYS, two tiles at a time. Each of the two
// computes the scores of one tile over all dims, then the outputs of half of the dims over both tiles. While one
// computes its softmax, the products of the other go on. They exchange weights through shared memory, in place of the
// rotary part of their tiles. Weights are rounded to T; the rounding errors average out over hundreds of tokens.
// Half of a tile's values is replaced as soon as its outputs are computed. merge_partitions joins the partitions.
constexpr int M = 64;                  // query heads of a thread group; missing ones are zeros
constexpr int THREADS = 32 * SG;       // three warpgroups
constexpr int TILES = D / 64;          // tiles of a key, of 64 values each
constexpr int HALF = DV / 128;         // tiles of half of the latent
constexpr int TILE = KEYS * 64;        // values of a tile, for all its tokens
constexpr int STAGE = TILES * TILE;
constexpr int DP = D - DV;             // values of the rotary part, after the latent
constexpr float NOTHING = -1.0e30f;

SHARED_ARRAY(T, shared, TILES * M * 64 + 2 * STAGE + 2 * M * 4 + 11 * 4);
T* const queries = shared;
T* const stages = queries + TILES * M * 64;
float* const tops = reinterpret_cast<float*>(stages + 2 * STAGE);  // exchanged by the warpgroups, per head: maxima
float* const sums = tops + 2 * M;                                  // and sums of weights
Flag* const full = reinterpret_cast<Flag*>(sums + 2 * M);  // [tile][half]: copied
Flag* const used = full + 4;                               // [tile][half]: its outputs are computed
Flag* const weighed = used + 4;                            // [tile]: its weights are stored
Flag* const both = weighed + 2;                            // first queries are loaded, then sums are stored

const int n_heads = q_shape[1];
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int head0 = static_cast<int>(threadgroup_position_in_grid.x) * M;
const int row = static_cast<int>(threadgroup_position_in_grid.y);
const int partition = static_cast<int>(threadgroup_position_in_grid.z);
const int n_partitions = static_cast<int>(threadgroups_per_grid.z);
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = thread_index % 32;
const int warp = thread_index / 32 % 4;    // within the warpgroup
const int group = simd_shuffle(thread_index / 128, 0);  // the compiler must know that it is uniform in a warp
const int r = lane / 4;
const int c = lane % 4;
const int own_head = warp * 16 + r;        // and own_head + 8
const int sequence = row / q_len;
const int64_t line0 = (static_cast<int64_t>(sequence) * n_heads + head0) * q_len + row % q_len;
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
const int size = 1 << static_cast<int>(params[3]);
const int origin = begin / 64 * 64;
const int lo = metal::max(begin, origin + partition * size);
const int hi = metal::min(end, origin + partition * size + size);
// If params[2] is set (only with q_len 1), k_new and v_new hold the row's newest token. It is read from there, and the
// first thread group of its partition stores it in its slot.
const int fresh = params[2] != 0.0f ? end - 1 : -1;

if (head0 + row + partition + thread_index == 0) {
  fence_out[0] = fence[0] + 1u;
}

if (lo < hi) {
  const int* const table = tables + static_cast<int64_t>(sequence) * max_blocks;
  const T* const new_latent = k_new + static_cast<int64_t>(row) * DV;
  const T* const new_rotated = v_new + static_cast<int64_t>(row) * DP;
  if (head0 == 0 && fresh >= lo && fresh < hi) {
    const int64_t at = static_cast<int64_t>(table[fresh / BS]) * BS + fresh % BS;
    for (int dim = thread_index; dim < DV; dim += THREADS) const_cast<T*>(k_pool)[at * DV + dim] = new_latent[dim];
    for (int dim = thread_index; dim < DP; dim += THREADS) const_cast<T*>(v_pool)[at * DP + dim] = new_rotated[dim];
  }

  if (thread_index == 0) {
    UNROLL
    for (int i = 0; i < 10; i++) full[i].begin(i < 4 ? 2 : 4);
    both->begin(8);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int first = lo / KEYS;
  const int last = (hi - 1) / KEYS;
  AsyncCopies copies;

  if (group == 2) {
    fewer_registers<72>();
    // A warp copies half of the tokens of every second tile, four tokens at a time by eight lanes each. Lane % OWN
    // numbers the token whose place the lane knows: its slot, NEW or DEAD. Dead tokens become zeros: their slots may
    // hold NaN, and NaN times a weight of 0 is NaN.
    constexpr int OWN = KEYS / 2, DEAD = -1, NEW = -2;
    const int tile = warp / 2, eighth = lane % 8;
    T* const stage = stages + tile * STAGE;
    auto slot_of = [&](int step) {
      const int position = step * KEYS + warp % 2 * OWN + lane % OWN;
      const int block = table[metal::min(metal::max(position / BS, lo / BS), (hi - 1) / BS)];
      return position < lo || position >= hi ? DEAD : position == fresh ? NEW : block * BS + position % BS;
    };
    int next = slot_of(first + tile);
    for (int step = first + tile; step <= last + tile; step += 2) {
      const int turn = (step - first) / 2 % 2;
      const int slot = next;
      next = slot_of(step + 2);
      int slots[OWN / 4];
      UNROLL
      for (int i = 0; i < OWN / 4; i++) slots[i] = simd_shuffle(slot, i * 4 + lane / 8);
      UNROLL
      for (int half = 0; half < 2; half++) {
        used[tile * 2 + half].wait(1 - turn);
        UNROLL
        for (int i = 0; i < OWN / 4; i++) {
          const int at = swizzled(warp % 2 * OWN + i * 4 + lane / 8, eighth);
          const T* const latent = (slots[i] < 0 ? new_latent : k_pool + static_cast<int64_t>(slots[i]) * DV) + half * (DV / 2) + eighth * 8;
          UNROLL
          for (int j = 0; j < HALF; j++) copies.copy(stage + (half * HALF + j) * TILE + at, latent + j * 64, slots[i] != DEAD);
          // The rotary part replaces the weights, which have been used for both halves.
          const T* const rotated = (slots[i] < 0 ? new_rotated : v_pool + static_cast<int64_t>(slots[i]) * DP) + eighth * 8;
          UNROLL
          for (int j = 0; j < DP / 64 && half == 1; j++) copies.copy(stage + (DV / 64 + j) * TILE + at, rotated + j * 64, slots[i] != DEAD);
        }
        copies.commit();
      }
      copies.wait_for_all_but<1>();
      full[tile * 2].arrive(lane);
      copies.wait();
      full[tile * 2 + 1].arrive(lane);
    }
  } else {
    more_registers<216>();
    UNROLL
    for (int i = 0; i < M * D / 8; i += 256) {
      const int head = (i + thread_index) / (D / 8), eighth = (i + thread_index) % (D / 8);
      const bool live = head0 + head < n_heads;
      if (M * D / 8 % 256 == 0 || head < M) {
        copies.copy(queries + eighth / 8 * (M * 64) + swizzled(head, eighth % 8), q + (line0 + (live ? head : 0) * q_len) * D + eighth * 8, live);
      }
    }
    copies.wait();
    both->arrive(lane);
    both->wait(0);

    const float gain = params[0] * LOG2E;
    auto compute = [&](auto own_group) {
      constexpr int GROUP = decltype(own_group)::value;
      float m[2], l[2];  // of heads own_head and own_head + 8; sums over this lane's tokens of the own tiles
      float acc[DV / 16][4];
      UNROLL
      for (int i = 0; i < 2; i++) {
        m[i] = NOTHING;
        l[i] = 0.0f;
      }
      UNROLL
      for (int i = 0; i < DV / 4; i++) acc[i / 4][i % 4] = 0.0f;
      T* const own = stages + GROUP * STAGE;
      // Rescale sums and outputs to new maxima.
      auto raise = [&](const float (&top)[2]) {
        float shrink[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
          shrink[i] = metal::fast::exp2((m[i] - top[i]) * gain);
          m[i] = top[i];
          l[i] *= shrink[i];
        }
        // Most tiles raise no maximum.
        if (simd_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
          UNROLL
          for (int i = 0; i < DV / 4; i++) acc[i / 4][i % 4] *= shrink[i % 4 / 2];
        }
      };
      auto weigh = [&](int tile) {
        multiply_columns<KEYS>(acc, stages + tile * STAGE + DV / 64 * TILE, stages + tile * STAGE + GROUP * HALF * TILE, TILE, lane, warp);
      };

      for (int step = first; step <= last; step += 2) {
        const int turn = (step - first) / 2 % 2;
        float s[KEYS / 8][4];
        full[GROUP * 2].wait(turn);
        multiply_rows<HALF, false>(s, queries, M * 64, own, TILE, lane, warp);
        full[GROUP * 2 + 1].wait(turn);
        multiply_rows<TILES - HALF, true>(s, queries + HALF * (M * 64), M * 64, own + HALF * TILE, TILE, lane, warp);
        const int begins = (step + GROUP) * KEYS;
        if (begins < lo || begins + KEYS > hi) {
          UNROLL
          for (int i = 0; i < KEYS / 2; i++) {
            const int token = begins + i / 4 * 8 + c * 2 + i % 2;
            if (token < lo || token >= hi) s[i / 4][i % 4] = NOTHING;
          }
        }
        float top[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
          top[i] = m[i];
          UNROLL
          for (int j = 0; j < KEYS / 4; j++) top[i] = metal::max(top[i], s[j / 2][i * 2 + j % 2]);
          top[i] = metal::max(top[i], simd_shuffle_xor(top[i], 1));
          top[i] = metal::max(top[i], simd_shuffle_xor(top[i], 2));
        }
        float before[2];  // maxima after the first tile
        if constexpr (GROUP == 1) {
          weighed[0].wait(turn);
          UNROLL
          for (int i = 0; i < 2; i++) {
            before[i] = tops[own_head + i * 8];
            top[i] = metal::max(top[i], before[i]);
          }
        }
        float sum[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
          if (c == 0) tops[GROUP * M + own_head + i * 8] = top[i];
          const float base = top[i] * gain;
          sum[i] = 0.0f;
          UNROLL
          for (int j = 0; j < KEYS / 8; j++) {
            s[j][i * 2] = metal::fast::exp2(metal::fma(s[j][i * 2], gain, -base));
            s[j][i * 2 + 1] = metal::fast::exp2(metal::fma(s[j][i * 2 + 1], gain, -base));
            sum[i] += s[j][i * 2] + s[j][i * 2 + 1];
          }
        }
        warpgroup_barrier(GROUP);
        T* const weights = own + DV / 64 * TILE;
        UNROLL
        for (int i = 0; i < KEYS / 4; i++) {
          *reinterpret_cast<uint*>(weights + swizzled(own_head + i % 2 * 8, i / 2) + c * 2) = pack_rounded<T>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
        }
        warpgroup_barrier(GROUP);
        weighed[GROUP].arrive(lane);
        if constexpr (GROUP == 1) {
          raise(before);
          weigh(0);
          used[1].arrive(lane);
        }
        raise(top);
        UNROLL
        for (int i = 0; i < 2; i++) l[i] += sum[i];
        weigh(GROUP);
        used[GROUP * 2 + GROUP].arrive(lane);
        if constexpr (GROUP == 0) {
          weighed[1].wait(turn);
          const float after[2] = {tops[M + own_head], tops[M + own_head + 8]};
          raise(after);
          weigh(1);
          used[2].arrive(lane);
        }
      }

      UNROLL
      for (int i = 0; i < 2; i++) {
        l[i] += simd_shuffle_xor(l[i], 1);
        l[i] += simd_shuffle_xor(l[i], 2);
        if (c == 0) sums[GROUP * M + own_head + i * 8] = l[i];
      }
      both->arrive(lane);
      both->wait(1);
      // Two lanes hold columns of the same two heads; each stores those of one head.
      const int head = own_head + c % 2 * 8;
      const int64_t at = (line0 + head * q_len) * n_partitions + partition;
      const bool live = head0 + head < n_heads;
      const float total = sums[head] + sums[M + head];
      if (GROUP == 0 && c < 2 && live) {
        stats[at * 2] = (c == 0 ? m[0] : m[1]) * gain;
        stats[at * 2 + 1] = total;
      }
      const float scale = SINGLE ? 1.0f / total : 1.0f;
      O* const line = out + at * DV + GROUP * (DV / 2) + c / 2 * 4;
      UNROLL
      for (int j = 0; j < DV / 16; j++) {
        float own[2], other[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
          own[i] = scale * (c % 2 == 0 ? acc[j][i] : acc[j][2 + i]);
          other[i] = scale * simd_shuffle_xor(c % 2 == 0 ? acc[j][2 + i] : acc[j][i], 1);
        }
        if (live) {
          if (c % 2 == 0) {
            store_four(line + j * 8, own[0], own[1], other[0], other[1]);
          } else {
            store_four(line + j * 8, other[0], other[1], own[0], own[1]);
          }
        }
      }
    };
    if (group == 0) {
      compute(Number<0>());
    } else {
      compute(Number<1>());
    }
  }
} else {
  // No visible token: merge_partitions never reads such a partition, and a row that sees no token gets zeros.
  for (int item = thread_index; item < M * DV; item += THREADS) {
    const int head = item / DV;
    if (head0 + head < n_heads) {
      const int64_t at = (line0 + head * q_len) * n_partitions + partition;
      if (item % DV == 0) {
        stats[at * 2] = NOTHING;
        stats[at * 2 + 1] = 0.0f;
      }
      if (SINGLE) out[at * DV + item % DV] = static_cast<O>(0.0f);
    }
  }
}
