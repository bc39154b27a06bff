// CUDA only: latent_decode for 16-bit types on the tensor cores. A thread group takes a row, up to 64 of its query heads and a
// partition of 2^params[3] tokens, KEYS at a time, which it reads once: as keys of D values and as values of the first DV.
// Its two warpgroups share the work twice: each computes the scores of half of the tokens, with all dims, and then the outputs
// of half of the dims, with all tokens. Weights go from one to the other through shared memory, rounded to T: over hundreds of
// tokens what that loses averages out.
// The next tokens are copied while these are computed. merge_partitions joins the partitions.
constexpr int M = 64;                  // query heads of a thread group; those that are missing are zeros
constexpr int THREADS = 32 * SG;       // two warpgroups
constexpr int TILES = D / 64;          // of 64 values, that a key has
constexpr int TILE = KEYS * 64;        // values of one, of all tokens
constexpr int STAGE = TILES * TILE;
constexpr int HALF = KEYS / 2;         // tokens whose scores are a warpgroup's
constexpr int DP = D - DV;             // values behind the latent, which positions are in
constexpr float NOTHING = -1.0e30f;
constexpr float LOG2E = 1.44269504088896341f;

SHARED_TILES(T, shared, TILES * M * 64 + 2 * STAGE + M * 64 + 2 * M * 2);
T* const queries = shared;
T* const stages = queries + TILES * M * 64;
T* const weights = stages + 2 * STAGE;
float* const between = reinterpret_cast<float*>(weights + M * 64);  // what the warpgroups tell each other of each head

const int n_heads = q_shape[1];
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int head0 = static_cast<int>(threadgroup_position_in_grid.x) * M;
const int row = static_cast<int>(threadgroup_position_in_grid.y);
const int partition = static_cast<int>(threadgroup_position_in_grid.z);
const int n_partitions = static_cast<int>(threadgroups_per_grid.z);
const int thread_index = static_cast<int>(thread_position_in_threadgroup.x);
const int lane = thread_index % 32;
const int warp = thread_index / 32 % 4;    // of the warpgroup
const int group = thread_index / 128;
const int r = lane / 4;
const int c = lane % 4;
const int own_head = warp * 16 + r;        // and 8 more
const int sequence = row / q_len;
const int64_t line0 = (static_cast<int64_t>(sequence) * n_heads + head0) * q_len + row % q_len;
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
const int size = 1 << static_cast<int>(params[3]);
const int origin = begin / 64 * 64;
const int lo = metal::max(begin, origin + partition * size);
const int hi = metal::min(end, origin + partition * size + size);
// With params[2] set (q_len is 1 then), the row's newest token comes with the call: it is read from there, and the first
// thread group whose partition it is in stores it into its slot.
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

  AsyncCopies copies;
  UNROLL
  for (int i = 0; i < M * D / 8; i += THREADS) {
    const int head = (i + thread_index) / (D / 8), eighth = (i + thread_index) % (D / 8);
    const bool live = head0 + head < n_heads;
    if (M * D / 8 % THREADS == 0 || head < M) {
      copies.copy(queries + eighth / 8 * (M * 64) + swizzled(head, eighth % 8), q + (line0 + (live ? head : 0) * q_len) * D + eighth * 8, live);
    }
  }
  // Of eight tokens at a time, which lie in one block. Dead ones are zeros: their slots may hold anything, and a weight of
  // zero does not make a NaN go away. They have the address of a live one that nobody stores to now.
  const int first = lo / KEYS;
  const int last = (hi - 1) / KEYS;
  auto load = [&](int step) {
    T* const stage = stages + (step - first) % 2 * STAGE;
    UNROLL
    for (int eight = 0; eight < KEYS / 8; eight += SG) {
      const int token = (eight + group * 4 + warp) * 8;  // of the stage
      if (KEYS / 8 % SG == 0 || token < KEYS) {
        const int position = step * KEYS + token;
        const int64_t slot = static_cast<int64_t>(table[metal::min(metal::max(position / BS, lo / BS), (hi - 1) / BS)]) * BS + position % BS;
        UNROLL
        for (int t = 0; t < 8; t++) {
          const bool live = position + t >= lo && position + t < hi;
          const T* const source = position + t == fresh || (fresh >= 0 && !live) ? new_latent : k_pool + (slot + t) * DV;
          UNROLL
          for (int i = 0; i < DV / 8; i += 32) {
            const int eighth = i + lane;
            if (DV / 8 % 32 == 0 || eighth < DV / 8) copies.copy(stage + eighth / 8 * TILE + swizzled(token + t, eighth % 8), source + eighth * 8, live);
          }
        }
        UNROLL
        for (int i = 0; i < DP; i += 32) {
          const int t = (i + lane) / (DP / 8), eighth = (i + lane) % (DP / 8);
          const bool live = position + t >= lo && position + t < hi;
          const T* const source = position + t == fresh || (fresh >= 0 && !live) ? new_rotated : v_pool + (slot + t) * DP;
          copies.copy(stage + (DV / 64 + eighth / 8) * TILE + swizzled(token + t, eighth % 8), source + eighth * 8, live);
        }
      }
    }
  };
  load(first);

  const float gain = params[0] * LOG2E;
  float m[2], l[2];  // of heads own_head and own_head + 8; the sum is of this lane's tokens
  float acc[DV / 16][4];
  UNROLL
  for (int i = 0; i < 2; i++) {
    m[i] = NOTHING;
    l[i] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < DV / 4; i++) acc[i / 4][i % 4] = 0.0f;

  for (int step = first; step <= last; step++) {
    const T* const stage = stages + (step - first) % 2 * STAGE;
    copies.wait();
    show_to_products();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (step < last) load(step + 1);

    float s[HALF / 8][4];
    multiply_rows<TILES>(s, queries, M * 64, stage + group * (HALF * 64), TILE, lane, warp);
    if (step * KEYS < lo || step * KEYS + KEYS > hi) {
      UNROLL
      for (int i = 0; i < HALF / 2; i++) {
        const int token = step * KEYS + group * HALF + i / 4 * 8 + c * 2 + i % 2;
        if (token < lo || token >= hi) s[i / 4][i % 4] = NOTHING;
      }
    }
    float top[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
      top[i] = m[i];
      UNROLL
      for (int j = 0; j < HALF / 4; j++) top[i] = metal::max(top[i], s[j / 2][i * 2 + j % 2]);
      top[i] = metal::max(top[i], simd_shuffle_xor(top[i], 1));
      top[i] = metal::max(top[i], simd_shuffle_xor(top[i], 2));
      if (c == 0) between[group * M + own_head + i * 8] = top[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float shrink[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
      top[i] = metal::max(top[i], between[(1 - group) * M + own_head + i * 8]);
      shrink[i] = metal::fast::exp2((m[i] - top[i]) * gain);
      m[i] = top[i];
      const float base = top[i] * gain;
      float sum = 0.0f;
      UNROLL
      for (int j = 0; j < HALF / 8; j++) {
        const float low = metal::fast::exp2(metal::fma(s[j][i * 2], gain, -base));
        const float high = metal::fast::exp2(metal::fma(s[j][i * 2 + 1], gain, -base));
        sum += low + high;
        *reinterpret_cast<uint*>(weights + swizzled(own_head + i * 8, group * (HALF / 8) + j) + c * 2) = pack_rounded<T>(low, high);
      }
      l[i] = metal::fma(l[i], shrink[i], sum);
    }
    // Most steps have no larger score than those before.
    if (simd_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {
      UNROLL
      for (int i = 0; i < DV / 4; i++) acc[i / 4][i % 4] *= shrink[i % 4 / 2];
    }
    show_to_products();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_columns<KEYS>(acc, weights, stage + group * (DV / 128) * TILE, TILE, lane, warp);
  }

  UNROLL
  for (int i = 0; i < 2; i++) {
    l[i] += simd_shuffle_xor(l[i], 1);
    l[i] += simd_shuffle_xor(l[i], 2);
    if (c == 0) between[group * M + own_head + i * 8] = l[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < 2; i++) {
    const int head = own_head + i * 8;
    if (head0 + head < n_heads) {
      const int64_t at = (line0 + head * q_len) * n_partitions + partition;
      const float total = between[head] + between[M + head];
      if (group == 0 && c == 0) {
        stats[at * 2] = m[i] * gain;
        stats[at * 2 + 1] = total;
      }
      const float scale = SINGLE ? 1.0f / total : 1.0f;
      UNROLL
      for (int j = 0; j < DV / 16; j++) {
        O* const target = out + at * DV + group * (DV / 2) + j * 8 + c * 2;
        target[0] = static_cast<O>(acc[j][i * 2] * scale);
        target[1] = static_cast<O>(acc[j][i * 2 + 1] * scale);
      }
    }
  }
} else {
  // Nothing visible here: merge_partitions never reads such a partition, a row that sees nothing at all gets zeros.
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
