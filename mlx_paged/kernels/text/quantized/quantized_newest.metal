  // Pages of quantised keys and values. A packet of VEC values lies in one group, whose scale and bias stay outside the
  // products: q . k = scale * (q . codes) + bias * sum(q). Codes are used where they stand in their word, times a power of
  // two, which the query takes away beforehand, and the accumulators in the end.
  constexpr int KW = VEC * KBITS / 32;
  constexpr int VW = VEC * VBITS / 32;
  constexpr int K_CODES = D * KBITS / 32;
  constexpr int V_CODES = DV * VBITS / 32;
  constexpr int K_GROUPS = D / GS;
  constexpr int V_GROUPS = DV / GS;
  constexpr int FACTOR = static_cast<int>(sizeof(T));
  constexpr int K_PAGE = BS * (K_CODES + K_GROUPS * FACTOR / 2);
  constexpr int V_PAGE = BS * (V_CODES + V_GROUPS * FACTOR / 2);
  float query_sum[HG * NK];
  float base[HG * NV];  // of the accumulators: the weighted biases
  UNROLL
  for (int i = 0; i < HG * NV; i++) {
    base[i] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < HG * NK; i++) {
    query_sum[i] = 0.0f;
    UNROLL
    for (int j = 0; j < VEC; j++) {
      query_sum[i] += query[i * VEC + j];
      query[i * VEC + j] *= 1.0f / static_cast<float>(1 << PLACE(j * KBITS));
    }
  }

  // Pages are written and read through one pointer each: a compiler may take for granted that memory reached by one buffer
  // argument, or by a const one, is not stored to by another.
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
    // It is attended to as its page holds it: what this thread group has just written.
    threadgroup_barrier(mem_flags::mem_device);
  }

