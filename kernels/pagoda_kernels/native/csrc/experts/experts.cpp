#include "experts/experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>

#include "linear/any_product.h"
#include "simd/activations.h"
#include "threads/parallel.h"

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

using packed::scratch;

constexpr int64_t kJobsEach = 6;  // for each thread: so many experts with tokens are divided among threads as they are
constexpr int64_t kItemsAtOnce = 4;    // neighbours that a thread takes of a product that several compute
constexpr int64_t kMostTokens = 2048;  // at a time: what experts give of more takes too much memory
constexpr int kGathered = 10, kWide = 11, kGatedRows = 12, kSums = 13, kPacked = 14,
              kResults = 15;  // uses of scratch memory

// Some tokens of one expert: places in the table of all choices, sorted by expert.
struct Job {
  const Expert* expert;
  int64_t begin, size;
};

// Every choice of every token, sorted by expert.
struct Table {
  std::vector<int64_t> rows;  // of a token's choices, token * top_k + rank, by place
  std::vector<Job> jobs;

  Table(const Experts& experts, const Choices& choices)
      : rows(static_cast<size_t>(choices.num_tokens * choices.top_k)) {
    const auto count = static_cast<int64_t>(rows.size());
    std::vector<int64_t> ends(experts.experts.size() + 1);
    for (int64_t i = 0; i < count; ++i) ++ends[choices.chosen[i] + 1];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    std::vector<int64_t> next(ends);
    for (int64_t i = 0; i < count; ++i) rows[next[choices.chosen[i]]++] = i;
    for (size_t e = 0; e < experts.experts.size(); ++e) {
      const int64_t size = ends[e + 1] - ends[e], parts = (size + AnyProduct::kMostRows - 1) / AnyProduct::kMostRows;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = ends[e] + size * part / parts, end = ends[e] + size * (part + 1) / parts;
        jobs.push_back({&experts.experts[e], begin, end - begin});
      }
    }
  }
};

bf16* bf16_scratch(uint32_t* words) { return reinterpret_cast<bf16*>(words); }

// The rows that a job's tokens have in x, one after the other, times their weights if those are on the input.
void gather(const Experts& experts, const Table& table, const Job& job, const Choices& choices, const bf16* x,
            int64_t hidden, bf16* to) {
  for (int64_t i = 0; i < job.size; ++i, to += hidden) {
    const int64_t choice = table.rows[job.begin + i];
    const bf16* from = x + choice / choices.top_k * hidden;
    if (!experts.scales_input) {
      std::memcpy(to, from, static_cast<size_t>(hidden) * sizeof(bf16));
      continue;
    }
    const Vec weight(choices.weights[choice]);
    for (int64_t k = 0; k < hidden; k += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, hidden - k));
      store(to + k, load(from + k, lanes) * weight, lanes);
    }
  }
}

// A product by one thread.
void multiply(const LinearWeights& weights, const bf16* x, bf16* out, int64_t num_rows) {
  const auto product = any_product(weights, x, out, num_rows);
  if (product->needs_packing()) {
    uint32_t* packed = scratch<kPacked>(product->packed_words());
    product->pack(packed);
    product->place(packed);
  }
  auto* sums = reinterpret_cast<float*>(scratch<kSums>(product->sums_of_item()));
  for (int64_t item = 0; item < product->items(); ++item) {
    product->compute(item, item + 1, sums);
    product->finish(item, item + 1, sums);
  }
}

// One expert after the other, each by one thread: their rows stay in its cache from matrix to matrix.
void run_jobs(const Experts& all, const Table& table, const Choices& choices, const bf16* x, bf16* results,
              int num_threads) {
  std::atomic<size_t> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    for (size_t i = next++; i < table.jobs.size(); i = next++) {
      const Job& job = table.jobs[i];
      const LinearWeights &gate_up = job.expert->gate_up, &down = job.expert->down;
      bf16* rows = bf16_scratch(scratch<kGathered>(job.size * gate_up.num_inputs / 2 + 1));
      bf16* wide = bf16_scratch(scratch<kWide>(job.size * gate_up.num_outputs / 2 + 1));
      bf16* gated = bf16_scratch(scratch<kGatedRows>(job.size * down.num_inputs / 2 + 1));
      gather(all, table, job, choices, x, gate_up.num_inputs, rows);
      multiply(gate_up, rows, wide, job.size);
      act_and_mul<bf16>(wide, gate_up.num_outputs, gated, job.size, down.num_inputs, all.activation, 1);
      multiply(down, gated, results + job.begin * down.num_outputs, job.size);
    }
  }
}

// Products of several matrices as one piece of work: threads, or helpers, divide the items of all.
class Products {
 public:
  void add(std::unique_ptr<AnyProduct> product) {
    num_items_ += product->items();
    most_sums_ = std::max(most_sums_, product->sums_of_item());
    products_.push_back(std::move(product));
  }

  int64_t num_parts(int64_t grain) const {
    int64_t count = 0;
    for (const auto& product : products_) count += (product->items() + grain - 1) / grain;
    return count;
  }

  // By the threads of OpenMP. Each packs products of its own before all of them multiply.
  void run(int num_threads) {
    int64_t words = 0;
    std::vector<int64_t> at;
    for (const auto& product : products_) {
      at.push_back(words);
      words += (product->packed_words() + 15) / 16 * 16;
    }
    uint32_t* packed = scratch<kPacked>(words + 1);
    make_parts(kItemsAtOnce);
    const auto count = static_cast<int64_t>(products_.size()), parts = static_cast<int64_t>(parts_.size());
    const auto pack = [&](int64_t i) {
      if (!products_[i]->needs_packing()) return;
      products_[i]->pack(packed + at[i]);
      products_[i]->place(packed + at[i]);
    };
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; ++i) pack(i);
      auto* sums = reinterpret_cast<float*>(scratch<kSums>(kItemsAtOnce * most_sums_));
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < parts; ++i) {
        compute(i, sums);
        finish(i, sums);
      }
    }
  }

  // By helpers; false: there is too much of it, nothing is computed. `self` outlives helpers that are late.
  static bool run(const std::shared_ptr<Products>& self, Helpers& helpers) {
    int64_t grain = helpers.grain(self->num_items_);
    while (self->num_parts(grain) > Helpers::kMaxParts && grain < self->num_items_) ++grain;
    int64_t words = 0;
    for (const auto& product : self->products_) words += (product->packed_words() + 15) / 16 * 16;
    if (self->num_parts(grain) > Helpers::kMaxParts || words * 4 > Helpers::kInputBytes) return false;
    auto* packed = static_cast<uint32_t*>(helpers.input());
    for (const auto& product : self->products_) {
      product->pack(packed);  // all of them: the caller's own rows may be gone when a late helper reads
      product->place(packed);
      packed += (product->packed_words() + 15) / 16 * 16;
    }
    self->make_parts(grain);
    helpers.run(Work{self.get(), grain}, static_cast<int64_t>(self->parts_.size()), self);
    return true;
  }

 private:
  struct Part {
    int64_t product, begin, end;
  };
  struct Work {
    const Products* products;
    int64_t grain;
    int64_t sums_size() const { return grain * products->most_sums_; }
    void compute(int64_t part, float* sums) const { products->compute(part, sums); }
    void finish(int64_t part, const float* sums) const { products->finish(part, sums); }
  };

  void make_parts(int64_t grain) {
    parts_.clear();
    for (size_t i = 0; i < products_.size(); ++i) {
      for (int64_t begin = 0; begin < products_[i]->items(); begin += grain) {
        parts_.push_back({static_cast<int64_t>(i), begin, std::min(products_[i]->items(), begin + grain)});
      }
    }
  }
  void compute(int64_t part, float* sums) const {
    products_[parts_[part].product]->compute(parts_[part].begin, parts_[part].end, sums);
  }
  void finish(int64_t part, const float* sums) const {
    products_[parts_[part].product]->finish(parts_[part].begin, parts_[part].end, sums);
  }

  std::vector<std::unique_ptr<AnyProduct>> products_;
  std::vector<Part> parts_;
  int64_t num_items_ = 0, most_sums_ = 0;
};

void run_products(const std::shared_ptr<Products>& products, const Team& team) {
  if (team.helpers == nullptr || !Products::run(products, *team.helpers)) products->run(team.threads());
}

// Few tokens: all threads divide each expert's items.
void run_items(const Experts& all, const Table& table, const Choices& choices, const bf16* x, bf16* results,
               const Team& team) {
  const LinearWeights &first = table.jobs.front().expert->gate_up, &last = table.jobs.front().expert->down;
  const auto count = static_cast<int64_t>(table.rows.size());
  const int64_t hidden = first.num_inputs, width = first.num_outputs, size = last.num_inputs;
  bf16* rows = bf16_scratch(scratch<kGathered>(count * hidden / 2 + 1));
  bf16* wide = bf16_scratch(scratch<kWide>(count * width / 2 + 1));
  bf16* gated = bf16_scratch(scratch<kGatedRows>(count * size / 2 + 1));
  const auto up = std::make_shared<Products>(), down = std::make_shared<Products>();
  for (const Job& job : table.jobs) {
    gather(all, table, job, choices, x, hidden, rows + job.begin * hidden);
    up->add(any_product(job.expert->gate_up, rows + job.begin * hidden, wide + job.begin * width, job.size));
    down->add(
        any_product(job.expert->down, gated + job.begin * size, results + job.begin * last.num_outputs, job.size));
  }
  run_products(up, team);
  act_and_mul<bf16>(wide, width, gated, count, size, all.activation, team.threads());
  run_products(down, team);
}

// out = residual + what experts give, weighted, + what the shared one gives.
void combine(const Experts& all, const Table& table, const Choices& choices, const bf16* results, const Extra& extra,
             bf16* out, int64_t hidden, const Team& team) {
  std::vector<int64_t> places(table.rows.size());
  for (size_t i = 0; i < table.rows.size(); ++i) places[table.rows[i]] = static_cast<int64_t>(i);
  parallel_for(choices.num_tokens, 8, team.threads(), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t k = 0; k < hidden; k += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, hidden - k));
        Vec total = extra.residual ? load(extra.residual + token * hidden + k, lanes) : Vec();
        for (int64_t i = token * choices.top_k; i < (token + 1) * choices.top_k; ++i) {
          const Vec weight(all.scales_input ? 1.0f : choices.weights[i]);
          total = fma(load(results + places[i] * hidden + k, lanes), weight, total);
        }
        if (extra.shared) {
          const Vec scale(extra.shared_scale ? extra.shared_scale[token] : 1.0f);
          total = fma(load(extra.shared + token * hidden + k, lanes), scale, total);
        }
        store(out + token * hidden + k, total, lanes);
      }
    }
  });
}

}  // namespace

void experts(const Experts& all, const bf16* x, const Choices& choices, const Extra& extra, bf16* out,
             const Team& team) {
  const int64_t hidden = all.experts.front().down.num_outputs, top_k = choices.top_k;
  for (int64_t begin = 0; begin < choices.num_tokens; begin += kMostTokens) {
    const int64_t count = std::min(kMostTokens, choices.num_tokens - begin);
    const Choices some{count, top_k, choices.chosen + begin * top_k, choices.weights + begin * top_k};
    const Extra of_some{extra.residual ? extra.residual + begin * hidden : nullptr,
                        extra.shared ? extra.shared + begin * hidden : nullptr,
                        extra.shared_scale ? extra.shared_scale + begin : nullptr};
    const Table table(all, some);
    bf16* results = bf16_scratch(scratch<kResults>(count * top_k * hidden / 2 + 1));
    const bf16* rows = x + begin * all.experts.front().gate_up.num_inputs;
    if (team.helpers == nullptr && static_cast<int64_t>(table.jobs.size()) >= kJobsEach * team.num_threads) {
      run_jobs(all, table, some, rows, results, team.num_threads);
    } else {
      run_items(all, table, some, rows, results, team);
    }
    combine(all, table, some, results, of_some, out + begin * hidden, hidden, team);
  }
}

void mixture(const Mixture& mixture, const bf16* x, const bf16* residual, bf16* out, int64_t num_tokens,
             const Team& team) {
  if (num_tokens == 0) return;
  const int64_t num_experts = mixture.router.num_outputs, top_k = mixture.routing.top_k,
                hidden = mixture.router.num_inputs;
  std::vector<float> logits(static_cast<size_t>(num_tokens * num_experts));
  linear<float>(mixture.router, x, nullptr, logits.data(), num_tokens, team);
  std::vector<float> weights(static_cast<size_t>(num_tokens * top_k));
  std::vector<int64_t> chosen(weights.size());
  parallel_for(num_tokens, 16, team.threads(), [&](int64_t begin, int64_t end) {
    route(logits.data() + begin * num_experts, end - begin, num_experts, mixture.routing,
          weights.data() + begin * top_k, chosen.data() + begin * top_k);
  });
  std::vector<bf16> shared;
  std::vector<float> scale;
  if (mixture.shared) {
    const LinearWeights &gate_up = mixture.shared->gate_up, &down = mixture.shared->down;
    std::vector<bf16> wide(static_cast<size_t>(num_tokens * gate_up.num_outputs));
    std::vector<bf16> gated(static_cast<size_t>(num_tokens * down.num_inputs));
    shared.resize(static_cast<size_t>(num_tokens * hidden));
    linear<bf16>(gate_up, x, nullptr, wide.data(), num_tokens, team);
    act_and_mul<bf16>(wide.data(), gate_up.num_outputs, gated.data(), num_tokens, down.num_inputs,
                      mixture.experts->activation, team.threads());
    linear<bf16>(down, gated.data(), nullptr, shared.data(), num_tokens, team);
  }
  if (mixture.shared_gate) {
    scale.resize(static_cast<size_t>(num_tokens));
    linear<float>(*mixture.shared_gate, x, nullptr, scale.data(), num_tokens, team);
    for (float& value : scale) value = 1.0f / (1.0f + std::exp(-value));
  }
  const Extra extra{residual, mixture.shared ? shared.data() : nullptr, mixture.shared_gate ? scale.data() : nullptr};
  experts(*mixture.experts, x, {num_tokens, top_k, chosen.data(), weights.data()}, extra, out, team);
}

#endif

}  // namespace pagoda
