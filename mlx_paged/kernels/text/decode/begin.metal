// Attention of one row (one query position of one sequence) over one partition, for the G query heads of one kv head. A row sees the tokens starts[row] <= t < ends[row]; nothing else is read.
//
// Grid: x = kv head, y = row, z = partition; SG simdgroups. HS of them share the heads, SG / HS stripes share the tokens.
// Inside a simdgroup LPT lanes hold one token, so 32 / LPT tokens pass at a time and U such steps make a chunk.
//
// A chunk has U * HG scores, of which each lane holds its elements' share. They are added up by halving: at every step a
// lane keeps half of its scores and gives the other half away, so that in the end each score is complete in one lane (or
// R of them in each), and its softmax is computed once instead of LPT times. Lane bit 0 stands for the top bit of a
// score's index u * HP + h, lane bit 1 for the next, and so on.
constexpr int NK = (D + LPT * VEC - 1) / (LPT * VEC);    // packets of a key per lane
constexpr int NV = (DV + LPT * VEC - 1) / (LPT * VEC);   // packets of a value per lane
constexpr int TPS = 32 / LPT;                            // tokens per step
constexpr int CHUNK = U * TPS;
constexpr int HG = (G + HS - 1) / HS;                    // query heads per simdgroup
constexpr int HP = HG > 8 ? 16 : HG > 4 ? 8 : HG > 2 ? 4 : HG; // rounded up to a power of two
constexpr int NS = U * HP;                               // scores of a chunk
constexpr int OWNERS = NS < LPT ? NS : LPT;              // lanes that hold different scores in the end; others repeat them
constexpr int R = NS / OWNERS;                           // scores of each
constexpr int BLOCKS = CHUNK > BS ? CHUNK / BS : 1;      // blocks that a chunk lies in
constexpr int STRIPES = SG / HS;
constexpr float NOTHING = -3.0e38f;
constexpr float LOG2E = 1.44269504088896341f;

threadgroup float tg_m[SG * HG];
threadgroup float tg_l[SG * HG];
threadgroup float tg_o[SG * HR * DV];

const int n_kv = static_cast<int>(threadgroups_per_grid.x);  // of latents: tiles of G query heads over the one
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = static_cast<int>(threadgroup_position_in_grid.x);
const int row = static_cast<int>(threadgroup_position_in_grid.y);
const int partition = static_cast<int>(threadgroup_position_in_grid.z);
const int n_partitions = static_cast<int>(threadgroups_per_grid.z);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int sub = lane % LPT;
const int step_token = lane / LPT;
const int stripe = sg / HS;
const int head0 = (sg % HS) * HG;
const int sequence = row / q_len;
// The first of this kv head's lines; a line is one (sequence, query head, query position) of q and out.
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + row % q_len;

const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
// A row that ends at most FIRST tokens after its first partition begins has that one alone: such launches need no merge.
const bool is_short = FIRST > 0 && end - first_partition<PART>(begin) <= FIRST;
const int size = is_short ? FIRST : partition_size<PART, SPAN>(end - begin);
const int origin = first_partition<PART>(begin);
const int lo = metal::max(begin, origin + partition * size);
const int hi = metal::min(end, origin + partition * size + size);
// With params[2] set (q_len is 1 then), the row's newest token comes with the call: it is read from there, and the
// threadgroup whose partition it is in stores it into its slot.
const int fresh = params[2] != 0.0f ? end - 1 : -1;
const int64_t fresh_row = static_cast<int64_t>(row) * n_kv + kv_head;

if (kv_head + row + partition + lane + sg == 0) {
  fence_out[0] = fence[0] + 1u;
}

if (lo < hi) {
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  float query[HG * NK * VEC];
  float acc[HG * NV * VEC];
  // Of the scores that this lane holds in the end: heads first_head .. first_head + R - 1 of step own_step.
  float m[R];
  float l[R];
  UNROLL
  for (int j = 0; j < R; j++) {
    m[j] = NOTHING;
    l[j] = 0.0f;
  }
  int own_step = 0;
  int first_head = 0;
  UNROLL
  for (int o = 1; o < OWNERS; o *= 2) {
    const int weight = (sub & o) != 0 ? NS / (2 * o) : 0;
    own_step += weight / HP;
    first_head += weight % HP;
  }
  UNROLL
  for (int h = 0; h < HG; h++) {
    UNROLL
    for (int i = 0; i < NK * VEC; i++) {
      const int dim = (i / VEC * LPT + sub) * VEC + i % VEC;
      query[h * NK * VEC + i] = dim < D && head0 + h < G ? gain * static_cast<float>(q[(line0 + (head0 + h) * q_len) * D + dim]) : 0.0f;
    }
    UNROLL
    for (int i = 0; i < NV * VEC; i++) {
      acc[h * NV * VEC + i] = 0.0f;
    }
  }

