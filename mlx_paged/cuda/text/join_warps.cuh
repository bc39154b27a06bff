// CUDA only, for the decode kernels for tensor cores: join the outputs in tg_o, from head h0 on, of all warps, then of
// partitions, always as the same tree.
__syncthreads();
for (int item = threadIdx.x; item < HR * DV / 4; item += SG * 32) {
  const int head = h0 + item / (DV / 4);
  const int at = item % (DV / 4);
  if (head < heads) {
    State whole = {tg_m[head], tg_l[head]};
    float4 o = *reinterpret_cast<const float4*>(&tg_o[head - h0][at * 4]);
    UNROLL
    for (int s = 1; s < SG; s++) {
      const State before = whole;
      const float4 before_o = o;
      whole = {tg_m[s * NT * 8 + head], tg_l[s * NT * 8 + head]};
      o = *reinterpret_cast<const float4*>(&tg_o[s * HR + head - h0][at * 4]);
      join(before, before_o, whole, o);
    }
    if (part % 2 == 1) join(wait[0][head], wait_o[0][head][at], whole, o);
    if (WAITS > 1 && (part == 3 || (part == 2 && first + part == last))) join(wait[WAITS - 1][head], wait_o[WAITS - 1][head][at], whole, o);
    if (first + part < last) {
      wait_o[part % WAITS][head][at] = o;
      if (at == 0) wait[part % WAITS][head] = whole;
    } else {
      end_run(head, at, whole, o);
    }
  }
}
