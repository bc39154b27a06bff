// CUDA: stand-ins for simdgroup_matrix, so that nvcc compiles the matrix kernels and their instructions can be counted.
// A product is one tensor-core instruction; its result means nothing.
struct ulong2 {
  __device__ ulong2(int) {}
};
__device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }
template <class T, int C, int R>
struct simdgroup_matrix {
  T part[2];
};
template <int C, int R>
struct simdgroup_matrix<float, C, R> {
  float part[4];  // tensor cores have 16 rows: the other eight are 0
};
template <class T, int C, int R>
__device__ inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) {
  return {{x, x}};
}
// A lane has two adjacent elements of a row.
template <class T>
__device__ inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const T* from, int n, ulong2 = 0, bool transposed = false) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  if (transposed) {
    const T* const first = from + (column * n + row);
    to.part[0] = first[0];
    to.part[1] = first[n];
  } else {
    const Packet<T, 2> both = *reinterpret_cast<const Packet<T, 2>*>(from + row * n + column);
    to.part[0] = both.part[0];
    to.part[1] = both.part[1];
  }
}
template <class T>
__device__ inline void simdgroup_store(simdgroup_matrix<T, 8, 8> from, T* to, int n) {
  const int lane = threadIdx.x % 32;
  *reinterpret_cast<Packet<T, 2>*>(to + lane / 4 * n + lane % 4 * 2) = Packet<T, 2>{{from.part[0], from.part[1]}};
}
__device__ inline uint word_of(__half a, __half b) { return __half_as_ushort(a) | static_cast<uint>(__half_as_ushort(b)) << 16; }
__device__ inline uint word_of(__nv_bfloat16 a, __nv_bfloat16 b) {
  return __bfloat16_as_ushort(a) | static_cast<uint>(__bfloat16_as_ushort(b)) << 16;
}
template <class A>
__device__ inline void simdgroup_multiply_accumulate(
    simdgroup_matrix<float, 8, 8>& to, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<A, 8, 8> b, simdgroup_matrix<float, 8, 8> c) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=f"(to.part[0]), "=f"(to.part[1]), "=f"(to.part[2]), "=f"(to.part[3])
      : "r"(word_of(a.part[0], a.part[1])), "r"(0), "r"(word_of(b.part[0], b.part[1])), "f"(c.part[0]), "f"(c.part[1]),
        "f"(c.part[2]), "f"(c.part[3]));
}
__device__ inline void simdgroup_multiply(
    simdgroup_matrix<float, 8, 8>& to, simdgroup_matrix<float, 8, 8> a, simdgroup_matrix<float, 8, 8> b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %5, %5}, {%6, %7}, {%8, %8, %8, %8};"
      : "=f"(to.part[0]), "=f"(to.part[1]), "=f"(to.part[2]), "=f"(to.part[3])
      : "r"(__float_as_uint(a.part[0])), "r"(0), "r"(__float_as_uint(b.part[0])), "r"(__float_as_uint(b.part[1])), "f"(0.0f));
}
