// CUDA only: helpers of the tensor-core bodies. Goes before prelude.cuh.
namespace mlx::core::cu {
// Load 16 bytes that are read once, without keeping them in L1. Not by ld.global.nc: the kernel may have stored them.
__device__ inline uint4 stream_load(const void* source) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(source));
  return x;
}
__device__ inline uint4 load_aligned(const void* source) {
  return *reinterpret_cast<const uint4*>(source);
}
__device__ inline bool is_aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}
template <class T>
__device__ inline unsigned pack(T low, T high) {
  unsigned short bits[2];
  memcpy(&bits[0], &low, 2);
  memcpy(&bits[1], &high, 2);
  return static_cast<unsigned>(bits[0]) | static_cast<unsigned>(bits[1]) << 16;
}
// Load eight values from an address that need not be a multiple of 16 bytes.
template <class T>
__device__ inline uint4 load_words(const T* source) {
  return make_uint4(pack(source[0], source[1]), pack(source[2], source[3]), pack(source[4], source[5]), pack(source[6], source[7]));
}
// Count this thread group as arrived, one of n, after its stores. Return true for the last: it sees the stores of all,
// and the counter is 0 again.
__device__ inline bool arrive(unsigned* counter, unsigned n) {
  unsigned before;
  asm volatile("atom.inc.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(n - 1) : "memory");
  if (before != n - 1) return false;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return true;
}
// Load what other thread groups have stored.
__device__ inline float4 load_relaxed(const float4* source) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(source) : "memory");
  return x;
}
__device__ inline float2 load_relaxed(const float2* source) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(source) : "memory");
  return x;
}
// Return 2^x; denormals are flushed to 0.
__device__ inline float power_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Largest score (base 2) and sum of weights of some tokens.
struct State {
  float m, l;
};
// Join an earlier state and output with a later one, into the later one.
__device__ inline void join(State a, float4 a_o, State& b, float4& b_o) {
  const float m = ::fmaxf(a.m, b.m);
  const float wa = power_of(a.m - m);
  const float wb = power_of(b.m - m);
  b = {m, ::fmaf(b.l, wb, a.l * wa)};
  b_o = make_float4(::fmaf(b_o.x, wb, a_o.x * wa), ::fmaf(b_o.y, wb, a_o.y * wa), ::fmaf(b_o.z, wb, a_o.z * wa), ::fmaf(b_o.w, wb, a_o.w * wa));
}
// Join them into the earlier one, if there is a later one.
__device__ inline void join_if(bool is_there, State& a, float4& a_o, State b, float4 b_o) {
  join(a, a_o, b, b_o);
  if (is_there) a = b, a_o = b_o;
}
// 8 x 8 matrix of 16-bit values, one row per four lanes: return its transpose.
__device__ inline unsigned transpose8x8(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ inline unsigned word(uint4 x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
template <class T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;
template <class T>
__device__ inline void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (is_half<T>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}
// Round two values to T and pack them, the first in the low half.
template <class T>
__device__ inline unsigned pack_rounded(float low, float high) {
  unsigned x;
  if constexpr (is_half<T>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  }
  return x;
}
// Return a * b + c of two packed values each, rounded once.
template <class T>
__device__ inline unsigned fma2(unsigned a, unsigned b, unsigned c) {
  unsigned x;
  if constexpr (is_half<T>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  }
  return x;
}
// Return byte i of a word: with 2^23 above it, it is the end of a float's mantissa.
__device__ inline float byte_of(unsigned x, int i) {
  return __uint_as_float(__byte_perm(x, 0x4b000000u, 0x7440 + i)) - 8388608.0f;
}
// Return the low (high) halves of two words, the first word's in the low half.
__device__ inline unsigned low_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
__device__ inline unsigned high_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }
// Return the first (low_of) or second (high_of) of two packed values.
template <class T>
__device__ inline float low_of(unsigned x) {
  if constexpr (!is_half<T>) return __uint_as_float(x << 16);
  float low;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(low) : "r"(x));
  return low;
}
template <class T>
__device__ inline float high_of(unsigned x) {
  if constexpr (!is_half<T>) return __uint_as_float(x & 0xffff0000u);
  float high;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(high) : "r"(x));
  return high;
}
// Store four adjacent values; the address is a multiple of their size.
template <class T>
__device__ inline void store_four(T* target, float a, float b, float c, float d) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(target) = make_float4(a, b, c, d);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(pack_rounded<T>(a, b), pack_rounded<T>(c, d));
  }
}
__device__ inline unsigned shared_address(const void* address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}
// Load four 8 x 8 matrices of 16-bit values from shared memory. Lanes 8i to 8i + 7 pass the addresses of the rows of
// matrix i. Of each matrix a lane gets two adjacent values of row lane / 4, or of column lane / 4 with load_transposed.
__device__ inline uint4 load_matrices(const void* row) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared_address(row)));
  return x;
}
__device__ inline uint4 load_transposed(const void* row) {
  uint4 x;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared_address(row)));
  return x;
}
// Asynchronous copies of 16 bytes from global to shared memory.
struct AsyncCopies {
  // If not live, write zeros and read nothing.
  __device__ void copy(void* target, const void* source, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(target)), "l"(source), "r"(live ? 16 : 0));
  }
  // Make one group of the copies that this thread began since the last commit.
  __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // Wait until all but the last COUNT groups have arrived.
  template <int COUNT>
  __device__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }
  // Wait until all copies of this thread have arrived.
  __device__ void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};
// Return x, of which the compiler then knows nothing: it recomputes what depends on x instead of keeping it in
// registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Tell the compiler that x is the same in all lanes of a warp.
__device__ inline int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}
// Multiply without letting the compiler fuse the product with a sum.
__device__ inline float product(float a, float b) {
  return __fmul_rn(a, b);
}
template <int N>
struct Number {
  static constexpr int value = N;
};
__device__ inline float float_of(unsigned bits) {
  return __uint_as_float(bits);
}
}  // namespace mlx::core::cu
// The launch's dynamic shared memory, which may exceed the 48 KB that a text may declare.
#define SHARED_BYTES(T, name, alignment) \
  extern __shared__ __align__(alignment) unsigned char name##_bytes[]; \
  T* const name = reinterpret_cast<T*>(name##_bytes)
#define SHARED_ARRAY(T, name, size) SHARED_BYTES(T, name, 16)
// Like SHARED_ARRAY, from a multiple of 1024 bytes on.
#define SHARED_TILES(T, name, size) SHARED_BYTES(T, name, 1024)
