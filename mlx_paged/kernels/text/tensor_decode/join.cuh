// Of the decode texts for tensor cores: warps, partitions and runs are joined, always as the same tree.
      __syncthreads();
      for (int item = threadIdx.x; item < HR * DV / 4; item += SG * 32) {
        const int head = h0 + item / (DV / 4);
        const int at = item % (DV / 4);
        if (head < G) {
          State whole = {NOTHING, 0.0f};
          UNROLL
          for (int s = 0; s < SG; s++) whole.m = ::fmaxf(whole.m, tg_m[s * NT * 8 + head]);
          float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          UNROLL
          for (int s = 0; s < SG; s++) {
            const float weight = ::exp2f(tg_m[s * NT * 8 + head] - whole.m);
            whole.l = ::fmaf(tg_l[s * NT * 8 + head], weight, whole.l);
            const float4 x = *reinterpret_cast<const float4*>(&tg_o[s * HR + head - h0][at * 4]);
            o = make_float4(::fmaf(x.x, weight, o.x), ::fmaf(x.y, weight, o.y), ::fmaf(x.z, weight, o.z), ::fmaf(x.w, weight, o.w));
          }
          if (part % 2 == 1) join(wait[0][head], wait_o[0][head][at], whole, o);
          if (part == 3 || (part == 2 && first + part == last)) join(wait[1][head], wait_o[1][head][at], whole, o);
          if (first + part < last) {
            wait_o[part % 2][head][at] = o;
            if (at == 0) wait[part % 2][head] = whole;
          } else if (n_live <= 1 << run_shift) {
            finish(head, at, whole, o);
          } else {
            const int64_t slot = (unit * n_runs + run) * G + head;
            reinterpret_cast<float4*>(partial)[slot * (DV / 4) + at] = o;
            if (at == 0) stats[slot] = make_float2(whole.m, whole.l);
          }
        }
      }
    }
  }

  const int n_live_runs = (n_live - 1 >> run_shift) + 1;
  if (n_live_runs > 1) {
    __syncthreads();
    if (threadIdx.x == 0) tg_last = arrive(const_cast<unsigned*>(arrivals) + unit, n_live_runs);
    __syncthreads();
    for (int item = threadIdx.x; tg_last && item < G * DV / 4; item += SG * 32) {
      const int head = item / (DV / 4);
      const float4* parts = reinterpret_cast<const float4*>(partial) + unit * n_runs * (G * DV / 4) + item;
      const float2* pairs = stats + unit * n_runs * G + head;
      State whole;
      float4 o;
      for (int p = 0; p < n_live; p += 8) {
        // Two trees; a run stands in the place of its first partition.
        State leaf[8];
        float4 leaf_o[8];
        UNROLL
        for (int i = 0; i < 8; i++) {
          if ((i & (1 << run_shift) - 1) == 0 && p + i < n_live) {
            const int64_t at = p + i >> run_shift;
            const float2 pair = load_relaxed(pairs + at * G);
            leaf[i] = {pair.x, pair.y};
            leaf_o[i] = load_relaxed(parts + at * (G * DV / 4));
          }
        }
        UNROLL
        for (int i = 0; i < 8; i += 4) {
          State& tree = leaf[i];
          float4& tree_o = leaf_o[i];
          if (run_shift == 0 && p + i + 1 < n_live) join(tree, tree_o, leaf[i + 1], leaf_o[i + 1]), tree = leaf[i + 1], tree_o = leaf_o[i + 1];
          if (run_shift == 0 && p + i + 3 < n_live) join(leaf[i + 2], leaf_o[i + 2], leaf[i + 3], leaf_o[i + 3]), leaf[i + 2] = leaf[i + 3], leaf_o[i + 2] = leaf_o[i + 3];
          if (run_shift <= 1 && p + i + 2 < n_live) join(tree, tree_o, leaf[i + 2], leaf_o[i + 2]), tree = leaf[i + 2], tree_o = leaf_o[i + 2];
          if (p + i > 0 && p + i < n_live) join(whole, o, tree, tree_o);
          if (p + i < n_live) whole = tree, o = tree_o;
        }
      }
      finish(head, item % (DV / 4), whole, o);
    }
  }
} else if (n_live == 0 && run == 0) {
  for (int item = threadIdx.x; item < G * DV; item += SG * 32) {
    out[(line0 + item / DV * q_len) * DV + item % DV] = static_cast<T>(0.0f);
  }
}
