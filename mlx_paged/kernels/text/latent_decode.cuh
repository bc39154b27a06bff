//// flags
// Barriers and register counts of warpgroups with different work in one thread group.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int COUNT>
__device__ inline void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ inline void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
#else
template <int COUNT>
__device__ inline void fewer_registers() {}
template <int COUNT>
__device__ inline void more_registers() {}
#endif
// Barrier of the 128 threads of one warpgroup.
__device__ inline void warpgroup_barrier(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// An mbarrier in shared memory. A turn ends after `arrivals` arrivals, and the next one begins.
struct Flag {
  unsigned long long bits;
  __device__ void begin(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }
  // Count one arrival for the warp, once all its lanes are here.
  __device__ void arrive(int lane) {
    __syncwarp();
    if (lane == 0) asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(shared_address(this)) : "memory");
  }
  // Wait for the end of a turn: with 0 of the first, third ... one, with 1 of the second, fourth ... one. Before the
  // first turn has ended, waiting with 1 returns at once.
  __device__ void wait(int turn) {
    unsigned over;
    do {
#if __CUDA_ARCH__ >= 900
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(over) : "r"(shared_address(this)), "r"(turn) : "memory");
#else
      asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(over) : "r"(shared_address(this)), "r"(turn) : "memory");
#endif
    } while (!over);
  }
};
//// boxes
// Copies of boxes, rows of 64 values of a table in global memory, by the tensor memory accelerator (TMA). It puts the
// eighths of a row where swizzled() says. A map of 128 bytes describes a table to it. A kernel makes its own maps: in
// shared memory, field by field (PTX: tensormap.replace), then copied to global memory.
// CUDA 12.6 or later: earlier compilers took a map's strides in other units.
struct alignas(128) BoxMap {
  unsigned words[32];
};
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 6))
#define HAS_BOXES 1
#define SET_FIELD(field, kind, constraint, value) \
  asm volatile("tensormap.replace.tile." field ".shared::cta.b1024." kind ", %1;" ::"r"(to), constraint(value) : "memory")
template <class T>
struct BoxTable {
  BoxMap* map;      // in global memory
  const T* values;  // 16-bit values
  int columns;
  int box_rows;     // a multiple of 8
  // Make the map, by a whole warp. A thread calls see() before its first copy.
  __device__ void make_map(BoxMap* scratch, int lane) const {
    const unsigned to = shared_address(scratch);
    scratch->words[lane] = 0;
    __syncwarp();
    if (lane == 0) {
      SET_FIELD("global_address", "b64 [%0]", "l", values);
      SET_FIELD("elemtype", "b32 [%0]", "n", 1);  // 16 bits
      SET_FIELD("rank", "b32 [%0]", "n", 1);      // two axes
      SET_FIELD("box_dim", "b32 [%0], 0", "n", 64);
      SET_FIELD("box_dim", "b32 [%0], 1", "r", box_rows);
      SET_FIELD("global_dim", "b32 [%0], 0", "r", columns);
      SET_FIELD("global_dim", "b32 [%0], 1", "n", 0x7fffffff);  // no limit of rows: tables of prepared launches grow
      SET_FIELD("global_stride", "b64 [%0], 0", "l", static_cast<unsigned long long>(columns) * 2);
      SET_FIELD("element_stride", "b32 [%0], 0", "n", 1);
      SET_FIELD("element_stride", "b32 [%0], 1", "n", 1);
      SET_FIELD("interleave_layout", "b32 [%0]", "n", 0);
      SET_FIELD("swizzle_mode", "b32 [%0]", "n", 3);  // 128 bytes
      SET_FIELD("fill_mode", "b32 [%0]", "n", 0);
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;" ::"l"(map), "r"(to) : "memory");
  }
  __device__ void see() const { asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory"); }
};
// Copies by one thread. It arrives at `flag`, whose turn does not end before `bytes` bytes have been copied.
struct BoxCopies {
  Flag* flag;
  __device__ BoxCopies(Flag* there, int bytes) : flag(there) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}\n" ::"r"(shared_address(flag)), "r"(bytes) : "memory");
  }
  template <class T>
  __device__ void copy(T* target, const BoxTable<T>& table, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(target)),
                 "l"(table.map), "r"(column), "r"(row), "r"(shared_address(flag))
                 : "memory");
  }
};
#endif
//// warpgroup
// Products of tiles in shared memory by a warpgroup of four warps: wgmma where the compiler has it (sm_90a), else
// mma.sync with the same layout of accumulators. A tile has rows of 64 16-bit values. Eighth e of row n is stored in
// place e ^ (n % 8), wgmma's swizzle of 128 bytes, so that the values of a column lie in different banks. Tiles begin
// at multiples of 1024 bytes.
// Accumulators of 64 rows and N columns: [j][e] of lane 4r + c, warp w is row 16w + r + 8 (e / 2), column 8j + 2c + e %
// 2.

// Return where the values of an eighth of a row begin.
__device__ inline int swizzled(int row, int eighth) { return row * 64 + (eighth ^ row % 8) * 8; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUPS 1
// Make what threads have stored and copied visible to products that begin after the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Return wgmma's descriptor of tiles of 64 columns; `leading` is the distance in bytes of the next tile along the other
// axis, for products across rows.
__device__ inline unsigned long long tile_at(const void* first, int leading) {
  const unsigned long long swizzle = 1, stride = 1024 >> 4, address = shared_address(first) >> 4 & 0x3fff;
  return address | static_cast<unsigned long long>(leading >> 4) << 16 | stride << 32 | swizzle << 62;
}
#define SUMS_4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define SUMS_16(j) SUMS_4(j), SUMS_4(j + 1), SUMS_4(j + 2), SUMS_4(j + 3)
#define SUMS_64(j) SUMS_16(j), SUMS_16(j + 4), SUMS_16(j + 8), SUMS_16(j + 12)
#define NAMES_16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_16_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_16_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_16_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_16_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_16_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_16_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_16_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define NAMES_64_0 NAMES_16_0 ", " NAMES_16_1 ", " NAMES_16_2 ", " NAMES_16_3
#define NAMES_64_1 NAMES_16_4 ", " NAMES_16_5 ", " NAMES_16_6 ", " NAMES_16_7
#define WGMMA(columns, type, names, sums, a, b, more, across) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " more ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
               " {" names "}, " a ", " b ", p, 1, 1, 0, " across ";\n}\n" : sums : "l"(left), "l"(right), "r"(goes_on))
// d = A B^T for 64 rows of A and N rows of B, or with ACROSS A B for N columns of B, 16 values deep; d += if goes_on.
template <class T, bool ACROSS, int J>
__device__ inline void multiply(float (&d)[J][4], unsigned long long left, unsigned long long right, int goes_on) {
  static_assert(J == 8 || J == 16 || J == 32, "64, 128 or 256 columns");
#define SUMS_32 SUMS_16(0), SUMS_16(4)
#define NAMES_32 NAMES_16_0 ", " NAMES_16_1
  if constexpr (J == 8 && !ACROSS && is_half<T>) WGMMA("64", "f16", NAMES_32, SUMS_32, "%32", "%33", "%34", "0");
  if constexpr (J == 8 && !ACROSS && !is_half<T>) WGMMA("64", "bf16", NAMES_32, SUMS_32, "%32", "%33", "%34", "0");
  if constexpr (J == 16 && ACROSS && is_half<T>) WGMMA("128", "f16", NAMES_64_0, SUMS_64(0), "%64", "%65", "%66", "1");
  if constexpr (J == 16 && ACROSS && !is_half<T>) WGMMA("128", "bf16", NAMES_64_0, SUMS_64(0), "%64", "%65", "%66", "1");
#define SUMS_128 SUMS_64(0), SUMS_64(16)
#define NAMES_128 NAMES_64_0 ", " NAMES_64_1
  if constexpr (J == 32 && ACROSS && is_half<T>) WGMMA("256", "f16", NAMES_128, SUMS_128, "%128", "%129", "%130", "1");
  if constexpr (J == 32 && ACROSS && !is_half<T>) WGMMA("256", "bf16", NAMES_128, SUMS_128, "%128", "%129", "%130", "1");
}
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Wait for the results of all products that have begun.
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#else
__device__ inline void show_to_products() {}
__device__ inline void begin_products() {}
__device__ inline void end_products() {}
#endif
// d = A B^T, or d += if GOES_ON: 64 rows of A and 8 J rows of B, each in TILES tiles, a_apart and b_apart values apart.
// As below, d is valid after end_products().
template <int TILES, bool GOES_ON, class T, int J>
__device__ inline void multiply_rows(float (&d)[J][4], const T* a, int a_apart, const T* b, int b_apart, int lane, int warp) {
#ifdef HAS_WARPGROUPS
  UNROLL
  for (int k = 0; k < TILES * 4; k++) {
    multiply<T, false>(d, tile_at(a + k / 4 * a_apart + k % 4 * 16, 16), tile_at(b + k / 4 * b_apart + k % 4 * 16, 16), GOES_ON || k > 0);
  }
#else
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
#endif
}

// d += A B: the first DEPTH columns of a tile A of 64 rows, and DEPTH rows of B in tiles of 64 columns, b_apart apart.
template <int DEPTH, class T, int J>
__device__ inline void multiply_columns(float (&d)[J][4], const T* a, const T* b, int b_apart, int lane, int warp) {
#ifdef HAS_WARPGROUPS
  UNROLL
  for (int k = 0; k < DEPTH / 16; k++) {
    multiply<T, true>(d, tile_at(a + k * 16, 16), tile_at(b + k * 16 * 64, b_apart * 2), 1);
  }
#else
  const int row = warp * 16 + lane % 16;
  for (int k = 0; k < DEPTH / 16; k++) {
    const uint4 x = load_matrices(a + swizzled(row, k * 2 + lane / 16));
    UNROLL
    for (int j = 0; j < J; j += 2) {
      const uint4 y = load_transposed(b + j / 8 * b_apart + swizzled(k * 16 + lane % 16, j % 8 + lane / 16));
      mma<T>(d[j], x.x, x.y, x.z, x.w, y.x, y.y);
      mma<T>(d[j + 1], x.x, x.y, x.z, x.w, y.z, y.w);
    }
  }
#endif
}
//// decode
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
constexpr float LOG2E = 1.44269504088896341f;

SHARED_TILES(T, shared, TILES * M * 64 + 2 * STAGE + 2 * M * 4 + 128 + 11 * 4);
T* const queries = shared;
T* const stages = queries + TILES * M * 64;
float* const tops = reinterpret_cast<float*>(stages + 2 * STAGE);  // exchanged by the warpgroups, per head: maxima
float* const sums = tops + 2 * M;                                  // and sums of weights
BoxMap* const scratch = reinterpret_cast<BoxMap*>(sums + 2 * M);   // maps of two tables
Flag* const full = reinterpret_cast<Flag*>(scratch + 2);   // [tile][half]: copied
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
#ifdef HAS_BOXES
    // Whole tiles are copied as boxes; tiles with dead tokens or the new one token by token. The maps are stored where
    // the results will be.
    constexpr int BOX = BS < OWN ? BS : OWN;
    BoxMap* const maps = reinterpret_cast<BoxMap*>(out + (line0 * n_partitions + partition) * DV);
    const BoxTable<T> latents = {maps, k_pool, DV, BOX}, rotated_parts = {maps + 1, v_pool, DP, BOX};
    if (warp == 0) latents.make_map(scratch, lane);
    if (warp == 1) rotated_parts.make_map(scratch + 1, lane);
    warpgroup_barrier(2);
    latents.see();
    rotated_parts.see();
#endif
    int next = slot_of(first + tile);
    for (int step = first + tile; step <= last + tile; step += 2) {
      const int turn = (step - first) / 2 % 2;
      const int slot = next;
      next = slot_of(step + 2);
#ifdef HAS_BOXES
      const int begins = step * KEYS;
      if (begins >= lo && begins + KEYS <= hi && (fresh < begins || fresh >= begins + KEYS)) {
        int box_slots[OWN / BOX];
        UNROLL
        for (int i = 0; i < OWN / BOX; i++) box_slots[i] = simd_shuffle(slot, i * BOX);
        UNROLL
        for (int half = 0; half < 2; half++) {
          used[tile * 2 + half].wait(1 - turn);
          if (lane == 0) {
            BoxCopies boxes(full + tile * 2 + half, OWN * (half == 0 ? DV / 2 : D - DV / 2) * static_cast<int>(sizeof(T)));
            UNROLL
            for (int i = 0; i < OWN / BOX; i++) {
              T* const target = stage + (warp % 2 * OWN + i * BOX) * 64;
              UNROLL
              for (int j = half * HALF; j < (half + 1) * HALF; j++) boxes.copy(target + j * TILE, latents, j * 64, box_slots[i]);
              UNROLL
              for (int j = 0; j < DP / 64 && half == 1; j++) boxes.copy(target + (DV / 64 + j) * TILE, rotated_parts, j * 64, box_slots[i]);
            }
          }
        }
        continue;
      }
#endif
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
      show_to_products();
      full[tile * 2].arrive(lane);
      copies.wait();
      show_to_products();
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
    show_to_products();
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
        begin_products();
        multiply_columns<KEYS>(acc, stages + tile * STAGE + DV / 64 * TILE, stages + tile * STAGE + GROUP * HALF * TILE, TILE, lane, warp);
      };

      for (int step = first; step <= last; step += 2) {
        const int turn = (step - first) / 2 % 2;
        float s[KEYS / 8][4];
        full[GROUP * 2].wait(turn);
        begin_products();
        multiply_rows<HALF, false>(s, queries, M * 64, own, TILE, lane, warp);
        full[GROUP * 2 + 1].wait(turn);
        multiply_rows<TILES - HALF, true>(s, queries + HALF * (M * 64), M * 64, own + HALF * TILE, TILE, lane, warp);
        end_products();
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
        show_to_products();
        warpgroup_barrier(GROUP);
        weighed[GROUP].arrive(lane);
        if constexpr (GROUP == 1) {
          raise(before);
          weigh(0);
          end_products();
          used[1].arrive(lane);
        }
        raise(top);
        UNROLL
        for (int i = 0; i < 2; i++) l[i] += sum[i];
        weigh(GROUP);
        end_products();
        used[GROUP * 2 + GROUP].arrive(lane);
        if constexpr (GROUP == 0) {
          weighed[1].wait(turn);
          const float after[2] = {tops[M + own_head], tops[M + own_head + 8]};
          raise(after);
          weigh(1);
          end_products();
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
