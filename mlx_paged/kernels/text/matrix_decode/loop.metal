threadgroup_barrier(mem_flags::mem_threadgroup);

float m[RT], l[RT];  // of the lane's rows; the sums are of the lane's scores
UNROLL
for (int r = 0; r < RT; r++) {
  m[r] = NOTHING;
  l[r] = 0.0f;
}
Sums acc[RT * (DV / 8)];
UNROLL
for (int v = 0; v < RT * (DV / 8); v++) {
  acc[v] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int step = lo / KEYS + sg; step <= (hi - 1) / KEYS; step += SG) {
