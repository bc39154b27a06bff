// Copies of whole boxes, some rows of 64 values of a table in global memory, by the GPU's own unit for them (TMA). It puts the
// eighths of a row where swizzled() does. What it has to know of a table is in a map of 128 bytes, which a kernel makes for itself:
// in shared memory, field by field (PTX: tensormap.replace), and from there to global memory.
// Compilers before CUDA 12.6 took a map's strides in other units.
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
  const T* values;  // of 16 bits
  int columns;
  int box_rows;     // a multiple of 8
  // By a whole warp; before a thread's first copy the others see() it.
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
      SET_FIELD("global_dim", "b32 [%0], 1", "n", 0x7fffffff);  // rows: a prepared launch outlives the growth of its table
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
// Of one thread, which arrives at a flag; its turn is not over before so many bytes of them have.
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
