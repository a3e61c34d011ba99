// Walks the thread blocks of vLLM's Marlin-MoE kernel on the CPU and says how much of C_tmp they
// address. test_marlin_buffer.py cuts the parts *.inc out of a release's ops.cu and
// marlin_template.h; what is written here are the loops around them, and the hardware.
//
// Units: C_tmp is addressed in int4 (16 bytes), its size is given in floats.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using std::max;
using std::min;

struct int4 {
  int x, y, z, w;
};
struct Index {
  unsigned x;
};
constexpr int div_ceil(int a, int b) { return (a + b - 1) / b; }

// What the host's code asks of CUDA. A kernel takes the registers, and is compiled for the
// configurations, that the problem at hand says.
struct Hardware {
  int registers;
  unsigned compiled;  // one bit for each configuration, by thread_n and thread_k
} hardware;
struct cudaFuncAttributes {
  int numRegs;
};
using Kernel = int;
constexpr Kernel MarlinDefault = 0;
void cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel) {
  attributes->numRegs = hardware.registers;
}
namespace vllm {
struct ScalarType {};
}  // namespace vllm
template <typename... Rest>
Kernel get_marlin_kernel(vllm::ScalarType, vllm::ScalarType, vllm::ScalarType, vllm::ScalarType,
                         int, int thread_n_blocks, int thread_k_blocks, Rest...) {
  int bit = thread_n_blocks == 16 ? 0 : thread_n_blocks == 4 ? 1 : thread_k_blocks == 8 ? 2 : 3;
  return (hardware.compiled >> bit) & 1;
}

namespace MARLIN_NAMESPACE_NAME {
#include "limits.inc"
}
using MARLIN_NAMESPACE_NAME::min_thread_k;
using MARLIN_NAMESPACE_NAME::min_thread_n;
#include "config.inc"

struct Ids {
  int64_t length;
  int64_t size(int) const { return length; }
};

// The floats that the host allocates for C_tmp.
long allocated(int64_t size_n, Ids sorted_token_ids, int sms, int64_t moe_block_size) {
#include "size.inc"
  return max_c_tmp_size;
}

struct Recorder {
  long highest = -1;
  int4 value;
  int4& operator[](unsigned index) {
    highest = max(highest, long(index));
    return value;
  }
};

struct Problem {
  int moe_block_size, prob_n, prob_k, parallel, sms, blocks;
  int threads, thread_n_blocks, thread_k_blocks, group_blocks;
  bool is_a_8bit;
  int64_t ids;
};

struct Reach {
  long highest = -1;  // int4 of C_tmp
  long lock = -1;
};

// What thread block `block` of `blocks` addresses; `reach` grows.
void walk(const Problem& problem, unsigned block, Reach& reach) {
  const Index blockIdx{block}, gridDim{unsigned(problem.blocks)};
  Index threadIdx{0};
  const int prob_n = problem.prob_n, prob_k = problem.prob_k, threads = problem.threads;
  const int thread_n_blocks = problem.thread_n_blocks, thread_k_blocks = problem.thread_k_blocks;
  const int group_blocks = problem.group_blocks, prob_m = 1, top_k = 1;
  const bool is_a_8bit = problem.is_a_8bit, use_atomic_add = false, use_fp32_reduce = true;
  const bool has_act_order = group_blocks == 0;
  const int64_t moe_block_size = problem.moe_block_size;
#include "launch.inc"
  const int num_tokens_past_padded = problem.parallel * problem.moe_block_size;
  using c_scalar_t2 = int;
  static int4 sh[4096], sh_red[1024], C[1];
  static float frag_c[1024], a_scales_ptr[1024];
  std::vector<int> lock_words(problem.sms * 4 + 1);
  int* locks = lock_words.data();
  auto __syncthreads = [] {};
  auto cp_async1_ca_pred = [](auto...) {};
  Recorder C_tmp;
#include "tiles.inc"
  auto update_next_moe_block_data = [&]() {
    if (par_id >= parallel) return;
    block_num_valid_tokens = moe_block_size;
  };
#include "slices.inc"
#include "warps.inc"
#include "reduce.inc"
  auto barrier_acquire = [&](int* lock, int) {
    reach.lock = max(reach.lock, long(lock - locks));
  };
  auto barrier_release = [](int*, bool) {};
  auto global_reduce_fp16 = [](bool, bool) {};
  auto thread_reduce = global_reduce_fp32;
  bool is_first_matmul_in_slice = true;
  int seen = -1;
  while (slice_iters) {
    slice_iters = 0;
    bool last = slice_idx == slice_count - 1;
    {
      // The address grows with the lock: all threads are walked only where that is a new highest.
      auto global_reduce_fp32 = [&](bool first, bool end) {
        if (locks_off <= seen) return;
        seen = locks_off;
        for (threadIdx.x = 0; threadIdx.x < unsigned(threads); threadIdx.x++)
          thread_reduce(first, end);
        threadIdx.x = 0;
      };
#include "call.inc"
    }
#include "next.inc"
  }
  reach.highest = max(reach.highest, C_tmp.highest);
  (void)is_first_matmul_in_slice;
}

long problems = 0, reducing = 0, too_small = 0, locks_short = 0;
long least_spare = -1;
double fullest = 0;

void print(const char* what, const Problem& p, long size, const Reach& reach) {
  printf("%s: moe_block_size %d, n %d, k %d, %d blocks of tokens in %ld sorted ids, %d SMs x %d, "
         "thread_n %d, thread_k %d, %d threads, group blocks %d, %d-bit A: %ld int4 of %ld\n",
         what, p.moe_block_size, p.prob_n, p.prob_k, p.parallel, long(p.ids), p.sms,
         p.blocks / p.sms, p.thread_n_blocks * 16, p.thread_k_blocks * 16, p.threads,
         p.group_blocks, p.is_a_8bit ? 8 : 16, reach.highest + 1, size / 4);
}

Reach check(const Problem& problem) {
  Reach reach;
  for (int block = problem.blocks - 1; block >= 0; block--) walk(problem, block, reach);
  long size = allocated(problem.prob_n, Ids{problem.ids}, problem.sms, problem.moe_block_size);
  problems++;
  if (reach.highest >= 0) {
    reducing++;
    long spare = size - 4 * (reach.highest + 1);
    if (spare < 0 && too_small++ < 5) print("too small", problem, size, reach);
    if (least_spare < 0 || spare < least_spare) least_spare = max(spare, 0L);
    fullest = max(fullest, 4.0 * (reach.highest + 1) / size);
  }
  if (reach.lock >= problem.sms * 4) locks_short++;
  return reach;
}

struct Threads {
  int k, n, threads;
};
const Threads TABLE[] = {{128, 128, 256}, {64, 256, 256}, {64, 128, 128}, {128, 64, 128}};
const int MOE_BLOCKS[] = {8, 16, 32, 48, 64};

// Every problem of few tiles and few thread blocks, with every configuration that is compiled.
void exhaustive(int blocks_max) {
  for (int blocks = 1; blocks <= blocks_max; blocks++)
    for (int per_sm = 1; per_sm <= 4; per_sm++) {
      if (blocks % per_sm) continue;
      for (const Threads& threads : TABLE)
        for (int moe_block_size : MOE_BLOCKS) {
          if (per_sm > 2 && moe_block_size > 16) continue;  // determine_exec_config's limit
          for (int n_tiles = 1; n_tiles <= 4; n_tiles++)
            for (int parallel = 1; parallel <= 9; parallel++)
              for (int k_tiles = 1; k_tiles <= 9; k_tiles++)
                for (int group : {-1, 0, 1, 2, 4, 8}) {
                  if (group > 0 && (k_tiles * threads.k / 16) % group) continue;
                  for (bool is_a_8bit : {false, true})
                    check({moe_block_size, n_tiles * threads.n, k_tiles * threads.k, parallel,
                           blocks / per_sm, blocks, threads.threads, threads.n / 16,
                           threads.k / 16, group, is_a_8bit,
                           int64_t(parallel) * moe_block_size});
                }
        }
    }
}

// Random problems up to the sizes of today's models; the release chooses the configuration.
void sampled(unsigned seed, int count) {
  std::mt19937 random(seed);
  auto pick = [&](auto list) { return *(list.begin() + random() % list.size()); };
  auto upto = [&](int most) {  // near to log-uniform
    return 1 + int(random() % (1 + (random() % most) / (1 + random() % 64)));
  };
  for (int i = 0; i < count; i++) {
    Problem p;
    p.moe_block_size = MOE_BLOCKS[random() % 5];
    p.prob_n = 64 * upto(512);
    p.prob_k = 64 * upto(256);
    p.sms = random() % 2 ? pick(std::initializer_list<int>{36, 48, 84, 108, 132, 142, 170, 188})
                         : 1 + int(random() % 256);
    p.is_a_8bit = random() % 2;
    p.parallel = upto(4096);
    // The ids may be more than the padded tokens, and no multiple of a block.
    p.ids = int64_t(p.parallel) * p.moe_block_size;
    if (random() % 2) p.ids += random() % (2 * p.moe_block_size);
    hardware = {1 + int(random() % 255), unsigned(random() % 16)};
    int group_size = pick(std::initializer_list<int>{-1, 16, 32, 64, 128});
    if (group_size > 0 && p.prob_k % group_size) group_size = -1;
    int prob_m = upto(1 << 16), prob_n = p.prob_n, prob_k = p.prob_k, sms = p.sms;
    int num_experts = upto(512), top_k = 1 + int(random() % 16), num_bits = random() % 2 ? 4 : 8;
    bool has_zp = random() % 2, is_zp_float = false, is_a_8bit = p.is_a_8bit;
    bool has_act_order = random() % 8 == 0, is_k_full = true;
    int stages = random() % 8 ? 4 : 2;
    int max_shared_mem =
        pick(std::initializer_list<int>{65536, 101376, 166912, 232448});  // 7.5, 12.x, 8.0, 9.0
    const int64_t moe_block_size = p.moe_block_size;
#include "launch.inc"
    vllm::ScalarType a_type, b_type, c_type, s_type;
    (void)has_act_order;
    (void)is_k_full;
    exec_config_t exec_cfg = determine_exec_config(
#include "arguments.inc"
    );
    if (exec_cfg.tb_cfg.thread_k == -1) continue;  // the operator refuses the shape
#include "blocks.inc"
    p.blocks = blocks;
    p.threads = exec_cfg.tb_cfg.num_threads;
    p.thread_n_blocks = exec_cfg.tb_cfg.thread_n / 16;
    p.thread_k_blocks = exec_cfg.tb_cfg.thread_k / 16;
    p.group_blocks = has_act_order && random() % 2 ? 0 : group_size == -1 ? -1 : group_size / 16;
    check(p);
  }
}

int main(int argc, char** argv) {
  if (argc == 2) exhaustive(atoi(argv[1]));
  if (argc == 3) sampled(atoi(argv[1]), atoi(argv[2]));
  if (argc == 13) {
    int v[12];
    for (int i = 0; i < 12; i++) v[i] = atoi(argv[i + 1]);
    Problem p{v[0], v[1],      v[2],      v[3], v[4],       v[4] * v[5],
              v[6], v[7] / 16, v[8] / 16, v[9], v[10] != 0, v[11]};
    Reach reach = check(p);
    printf("int4 %ld of %ld\n", reach.highest + 1,
           allocated(p.prob_n, Ids{p.ids}, p.sms, p.moe_block_size) / 4);
  }
  printf("problems %ld reducing %ld too_small %ld locks_short %ld least_spare %ld fullest %.6f\n",
         problems, reducing, too_small, locks_short, least_spare, fullest);
}
