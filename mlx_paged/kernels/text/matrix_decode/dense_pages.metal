threadgroup T edges[64 * SG];
