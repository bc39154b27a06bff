// The pool is written and read through one pointer each: a compiler may take for granted that memory reached by one buffer
// argument, or by a const one, is not stored to by another.
device T* const k_pages = const_cast<device T*>(k_pool);
device T* const v_pages = const_cast<device T*>(v_pool);
if (fresh >= lo && fresh < hi) {
  const int64_t at = (static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
  for (int dim = sg * 32 + lane; dim < D; dim += SG * 32) {
    k_pages[at * D + dim] = k_new[fresh_row * D + dim];
  }
  for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
    v_pages[at * DV + dim] = v_new[fresh_row * DV + dim];
  }
  threadgroup_barrier(mem_flags::mem_device);
}
