  if (fresh >= lo && fresh < hi) {
    const int64_t at = (static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
    for (int dim = sg * 32 + lane; dim < D; dim += SG * 32) {
      const_cast<device T*>(k_pool)[at * D + dim] = k_new[fresh_row * D + dim];
    }
    for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
      const_cast<device T*>(v_pool)[at * DV + dim] = v_new[fresh_row * DV + dim];
    }
  }

