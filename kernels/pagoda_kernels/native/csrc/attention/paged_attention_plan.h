// Divides the attention of a batch into tasks of like cost. Knows lengths and block tables; no queries, no keys, no
// sums.
#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"
#include "attention/shared_prefixes.h"

namespace pagoda::attention {

constexpr int64_t kPartitionKeys = 1024;     // keys whose sums may be made apart, counted from position 0
constexpr int64_t kSingleThreadWork = 4096;  // keys times rows (packing included) that are not worth waking a thread

// A query token, and where sums over some partitions of its keys go until they are merged.
struct Query {
  int64_t token, position;  // in the batch; in its sequence
  int64_t partial = 0;      // of partition 0, and the distance to the next partition's
  int64_t partial_stride = 0;
};

// Some queries, some KV heads, some keys: [begin, end) in the blocks of `seq`, where begin is a tile's.
struct Task {
  // Sums over shared keys are computed before those that go on from them.
  enum class Order { kShared, kAlone, kAfterShared };

  int64_t seq;
  int64_t query, num_queries;  // in Plan::queries; of one sequence at consecutive positions, unless order is kShared
  int64_t head, num_heads;     // KV heads
  int64_t begin, end;
  bool is_apart;  // whether each partition's sums go to the partials, to be merged; else they are the output
  Order order;
  int64_t cost;

  // Whether the partial of the first partition holds sums over its keys below `begin`.
  bool is_resumed() const { return order == Order::kAfterShared && begin % kPartitionKeys != 0; }
};

// Queries of a sequence whose partitions were computed apart.
struct Merge {
  int64_t token, num_tokens;
  int64_t partial, num_partitions;  // partials are [partition][token]
};

class Plan {
 public:
  Plan(const AttentionBatch& batch, int num_threads);

  // First key that is seen from a position.
  int64_t first_key(int64_t position) const {
    return batch_.window && position >= batch_.window ? position - batch_.window + 1 : 0;
  }

  std::vector<Query> queries;  // all tokens of the batch, then those of groups that share keys
  std::vector<Task> tasks;     // in the order in which they are to be begun
  std::vector<Merge> merges;
  int64_t num_partials = 0;
  int64_t num_shared = 0;  // tasks of order kShared
  int64_t cost = 0;        // of all tasks, about

 private:
  bool is_stream(int64_t tokens) const;
  int64_t cost_of(int64_t num_keys, int64_t tokens) const;
  int64_t own_cost(int64_t seq) const;
  std::vector<SharedPrefix> share();
  void add_stream(int64_t seq, int64_t target);
  void add_prefill(int64_t seq, int num_threads);
  void add_shared(const SharedPrefix& prefix, int64_t target);

  const AttentionBatch& batch_;
  int64_t group_;                         // heads of a KV head
  std::vector<int64_t> tokens_;           // first token of each sequence
  std::vector<int64_t> num_shared_keys_;  // of each sequence
};

}  // namespace pagoda::attention
