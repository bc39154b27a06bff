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

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int table = sequence * max_blocks;
  int chunk = first_chunk + (stripe + STRIPES - first_chunk % STRIPES) % STRIPES;
  // The ids of a chunk's blocks are read one chunk ahead. Outside of what is visible, the nearest one inside is taken.
  int blocks[BLOCKS];
  UNROLL
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = tables[table + metal::min(metal::max(chunk * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
  }
  for (; chunk <= last_chunk; chunk += STRIPES) {
    uint keys[U * NK * KW];
    uint values[U * NV * VW];
    T key_scale[U * NK];
    T key_bias[U * NK];
    T value_scale[U * NV];
    T value_bias[U * NV];
    UNROLL
    for (int u = 0; u < U; u++) {
      // A token outside [lo, hi) is replaced by the nearest one inside (its score is dropped below), so that every
      // address is of a live token. So is a packet past the end of a row, by the first one: its query is 0.
      const int token = chunk * CHUNK + u * TPS;
      const int64_t page = static_cast<int64_t>(blocks[u * TPS / BS]) * n_kv + kv_head;
      const int inside = metal::min(metal::max(token + step_token, lo), hi - 1) % BS;
      auto key_page = k_pages + page * K_PAGE;
      auto value_page = v_pages + page * V_PAGE;
      auto key_factors = reinterpret_cast<const device T*>(key_page + BS * K_CODES) + inside * 2 * K_GROUPS;
      auto value_factors = reinterpret_cast<const device T*>(value_page + BS * V_CODES) + inside * 2 * V_GROUPS;
      UNROLL
      for (int i = 0; i < NK; i++) {
        const int dim = (i * LPT + sub) * VEC < D ? (i * LPT + sub) * VEC : 0;
        load_words<KW>(key_page + inside * K_CODES + dim / VEC * KW, keys + (u * NK + i) * KW);
        key_scale[u * NK + i] = key_factors[dim / GS];
        key_bias[u * NK + i] = key_factors[K_GROUPS + dim / GS];
      }
      UNROLL
      for (int i = 0; i < NV; i++) {
        const int dim = (i * LPT + sub) * VEC < DV ? (i * LPT + sub) * VEC : 0;
        load_words<VW>(value_page + inside * V_CODES + dim / VEC * VW, values + (u * NV + i) * VW);
        value_scale[u * NV + i] = value_factors[dim / GS];
        value_bias[u * NV + i] = value_factors[V_GROUPS + dim / GS];
      }
    }
    UNROLL
    for (int i = 0; i < BLOCKS; i++) {
      blocks[i] = tables[table + metal::min(metal::max((chunk + STRIPES) * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
    }

    float score[NS];
    UNROLL
    for (int u = 0; u < U; u++) {
      UNROLL
      for (int h = 0; h < HP; h++) {
        score[u * HP + h] = 0.0f;
      }
      UNROLL
      for (int i = 0; i < NK; i++) {
        float product[HG];
        UNROLL
        for (int h = 0; h < HG; h++) {
          product[h] = 0.0f;
        }
        UNROLL
        for (int j = 0; j < VEC; j++) {
          const float code = code_in_place<KBITS>(keys[(u * NK + i) * KW + j * KBITS / 32], j * KBITS % 32);
          UNROLL
          for (int h = 0; h < HG; h++) {
            product[h] = metal::fma(query[(h * NK + i) * VEC + j], code, product[h]);
          }
        }
        const float scale = static_cast<float>(key_scale[u * NK + i]);
        const float bias = static_cast<float>(key_bias[u * NK + i]);
        UNROLL
        for (int h = 0; h < HG; h++) {
          score[u * HP + h] = metal::fma(scale, product[h], metal::fma(bias, query_sum[h * NK + i], score[u * HP + h]));
        }
      }
    }
