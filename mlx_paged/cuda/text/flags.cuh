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
