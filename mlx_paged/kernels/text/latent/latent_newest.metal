  (void)fresh_row;  // of keys with heads
  // Of latent_decode: a token is a latent of DV elements and, in the other pool, D - DV that positions are in. A key is both,
  // one after the other, and the value is the latent: packets of a lane's keys that it has loaded already.
  if (kv_head == 0 && fresh >= lo && fresh < hi) {
    const int64_t at = static_cast<int64_t>(tables[sequence * max_blocks + fresh / BS]) * BS + fresh % BS;
    for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
      const_cast<device T*>(k_pool)[at * DV + dim] = k_new[static_cast<int64_t>(row) * DV + dim];
    }
    for (int dim = sg * 32 + lane; dim < D - DV; dim += SG * 32) {
      const_cast<device T*>(v_pool)[at * (D - DV) + dim] = v_new[static_cast<int64_t>(row) * (D - DV) + dim];
    }
  }

