  // Each pool is written and read through one pointer: a compiler may assume that memory reached through one buffer
  // argument, or through a const one, is not written through another.
  auto k_pages = const_cast<device uint*>(k_pool);
  auto v_pages = const_cast<device uint*>(v_pool);
  if (fresh >= lo && fresh < hi) {
    constexpr int PER = GS / 32;
    const int64_t block = tables[sequence * max_blocks + fresh / BS];
    const int offset = fresh % BS;
    for (int task = sg; task < K_GROUPS + V_GROUPS; task += SG) {
      float x[PER];
      if (task < K_GROUPS) {
        auto source = k_new + fresh_row * D + task * GS + lane * PER;
        UNROLL
        for (int i = 0; i < PER; i++) {
          x[i] = static_cast<float>(source[i]);
        }
        auto page = k_pages + (block * n_kv + kv_head) * K_PAGE;
        auto factors = reinterpret_cast<device T*>(page + BS * K_CODES) + offset * 2 * K_GROUPS;
        store_group<T, PER>(x, KBITS, task, K_GROUPS, lane, page + offset * K_CODES, factors);
      } else {
        auto source = v_new + fresh_row * DV + (task - K_GROUPS) * GS + lane * PER;
        UNROLL
        for (int i = 0; i < PER; i++) {
          x[i] = static_cast<float>(source[i]);
        }
        auto page = v_pages + (block * n_kv + kv_head) * V_PAGE;
        auto factors = reinterpret_cast<device T*>(page + BS * V_CODES) + offset * 2 * V_GROUPS;
        store_group<T, PER>(x, VBITS, task - K_GROUPS, V_GROUPS, lane, page + offset * V_CODES, factors);
      }
    }
    // The token is read below as its page holds it, so wait for the stores of this thread group.
    threadgroup_barrier(mem_flags::mem_device);
  }

