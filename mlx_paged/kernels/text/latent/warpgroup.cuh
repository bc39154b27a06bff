// Products of tiles in shared memory by a warpgroup, four warps: wgmma where the compiler has it (sm_90a), else mma.sync, with
// the same accumulators. A tile has rows of 64 values of 16 bits; the eighth e of row n lies where e ^ n % 8 would: that keeps
// columns of a tile in different banks, and is what wgmma calls a swizzle of 128 bytes. Tiles begin at multiples of 1024 bytes.
// Accumulators of 64 rows and N columns: [j][e] of lane 4r + c in warp w is row 16w + r + 8 (e / 2), column 8j + 2c + e % 2.
// Where the values of an eighth of a row begin.
__device__ inline int swizzled(int row, int eighth) { return row * 64 + (eighth ^ row % 8) * 8; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUPS 1
// What threads have stored and copied is seen by products that begin after the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Of tiles of 64 values: `leading` bytes to the next tile along the other axis, where the product runs across rows.
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
// d (+)= A B^T for A of 64 rows and B of N, or A B for B of N columns if it is read across rows; 16 values deep.
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
// Until all that have begun are there.
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#else
__device__ inline void show_to_products() {}
__device__ inline void begin_products() {}
__device__ inline void end_products() {}
#endif
// d = A B^T, or d += if it goes on: 64 rows of A, 8 J rows of B, of `tiles` tiles each, which lie so many values apart. It is there
// after end_products(), like those below.
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

// d += A B: a tile A of 64 rows, of whose columns the first DEPTH are used; DEPTH rows of B in tiles of 64 columns each.
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
