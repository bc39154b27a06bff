// CUDA only: paged_decode for 16-bit types on the tensor cores (mma.sync m16n8k16, float accumulators).
// Same partitions as paged_decode. A thread group takes a run of 1, 2 or 4 (2^params[3]) of them, and the last group
// of a row and kv head to finish joins the runs: no second kernel. Partitions are always joined as the same tree, four
// by four, so the result has the same bits for every length of runs.
// Each warp takes whole chunks of 16 * U tokens:
//   scores  S[token, head]  = K[token, dim] Q[dim, head]     K rows go from memory straight into the A fragments
//   output  O[dim, head]   += V^T[dim, token] P[token, head]  V rows are paired by byte permutes into A fragments
// Heads are the 8 columns (NT column tiles for more than 8). The order of dims inside a fragment is ours to choose as
// long as both factors agree, so every load is 16 bytes: a lane holds dims 8c.. of a key row, 8r.. of a value row.
// A probability is split into two 16-bit halves (high and remainder), so P keeps float's precision to about 2^-16.
constexpr int NT = (G + 7) / 8;
constexpr int KT = (D + 31) / 32;    // 32 dims of a key row per load
constexpr int VT = (DV + 63) / 64;   // 64 dims of a value row per load
