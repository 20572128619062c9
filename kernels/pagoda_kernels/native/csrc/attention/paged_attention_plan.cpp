#include "attention/paged_attention_plan.h"

#include <algorithm>
#include <tuple>

#include "attention/paged_attention_tile.h"

namespace pagoda::attention {
namespace {

constexpr int64_t kStreamRows = 16;  // up to so many rows of a KV head, reading the cache is what takes the time
// Rows of one task otherwise: packing a key costs like some 5. Those that do not take partitions go through the sums of
// all of them for each tile.
constexpr int64_t kPrefillRows = kUsesAmx<bf16> ? 1024 : 512;
constexpr int64_t kPackingRows = 8;  // what packing a key costs, in rows
constexpr int64_t kTasksPerThread = 4;

}  // namespace

Plan::Plan(const AttentionBatch& batch, int num_threads)
    : batch_(batch), group_(batch.num_heads / batch.num_kv_heads), num_shared_keys_(batch.num_seqs, 0) {
  int64_t token = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    tokens_.push_back(token);
    const int64_t last = token + batch.query_lens[seq];
    for (; token < last; ++token) queries.push_back({token, batch.seq_lens[seq] - last + token});
  }
  const std::vector<SharedPrefix> prefixes = share();
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) cost += own_cost(seq);
  for (const SharedPrefix& prefix : prefixes) {
    int64_t num_tokens = 0;
    for (const int64_t seq : prefix.seqs) num_tokens += batch.query_lens[seq];
    cost += cost_of(prefix.num_keys, num_tokens) * batch.num_kv_heads;
  }
  const int64_t target = std::max<int64_t>(1, num_threads == 1 ? cost : cost / (num_threads * kTasksPerThread));
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (batch.query_lens[seq] == 0) continue;
    if (is_stream(batch.query_lens[seq])) {
      add_stream(seq, target);
    } else {
      add_prefill(seq, num_threads);
    }
  }
  for (const SharedPrefix& prefix : prefixes) add_shared(prefix, target);
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    return std::make_tuple(a.order, -a.cost) < std::make_tuple(b.order, -b.cost);
  });
}

bool Plan::is_stream(int64_t tokens) const { return tokens * group_ <= kStreamRows; }

// Of one KV head: keys times rows, about.
int64_t Plan::cost_of(int64_t num_keys, int64_t tokens) const { return num_keys * (tokens * group_ + kPackingRows); }

// Of all KV heads of a sequence, without the keys that it shares.
int64_t Plan::own_cost(int64_t seq) const {
  const int64_t tokens = batch_.query_lens[seq], position = batch_.seq_lens[seq] - tokens;
  if (tokens == 0) return 0;
  const int64_t begin = std::max(first_key(position), num_shared_keys_[seq]);
  return cost_of(position + tokens / 2 + 1 - begin, tokens) * batch_.num_kv_heads;
}

// Sequences of few rows that see all of their keys, at least one of which stays their own.
std::vector<SharedPrefix> Plan::share() {
  std::vector<Candidate> candidates;
  for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
    const int64_t tokens = batch_.query_lens[seq], position = batch_.seq_lens[seq] - tokens;
    if (tokens == 0 || !is_stream(tokens) || position < kTileKeys || first_key(position + tokens - 1) > 0) continue;
    candidates.push_back({seq, position / kTileKeys * kTileKeys});
  }
  std::vector<SharedPrefix> prefixes = find_shared_prefixes(batch_, std::move(candidates));
  for (const SharedPrefix& prefix : prefixes) {
    for (const int64_t seq : prefix.seqs) num_shared_keys_[seq] = prefix.num_keys;
  }
  return prefixes;
}

// Few rows: all heads of a key at once read the cache as it lies, so heads are parted only if partitions do not
// suffice.
void Plan::add_stream(int64_t seq, int64_t target) {
  const int64_t tokens = batch_.query_lens[seq], token = tokens_[seq], end = batch_.seq_lens[seq];
  const int64_t first = first_key(end - tokens), num_shared_keys = num_shared_keys_[seq];
  const int64_t begin = std::max(first / kTileKeys * kTileKeys, num_shared_keys);
  const int64_t from = begin / kPartitionKeys, partitions = (end - 1) / kPartitionKeys - from + 1;
  const int64_t whole = own_cost(seq), pieces = divide_up(whole, target);
  const bool is_split = pieces > 1 && partitions > 1;
  const int64_t parts = is_split ? partitions : 1;
  const int64_t ranges = std::clamp<int64_t>(divide_up(pieces, parts), 1, batch_.num_kv_heads);
  const bool is_apart = is_split || num_shared_keys > 0;
  if (is_apart) {
    const int64_t earliest = first / kPartitionKeys, count = from + partitions - earliest;
    for (int64_t i = 0; i < tokens; ++i) {
      queries[token + i].partial = num_partials + i - earliest * tokens;
      queries[token + i].partial_stride = tokens;
    }
    merges.push_back({token, tokens, num_partials, count});
    num_partials += count * tokens;
  }
  const Task::Order order = num_shared_keys > 0 ? Task::Order::kAfterShared : Task::Order::kAlone;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t part_begin = part == 0 ? begin : (from + part) * kPartitionKeys;
    const int64_t part_end = is_split ? std::min(end, (from + part + 1) * kPartitionKeys) : end;
    for (int64_t range = 0; range < ranges; ++range) {
      const int64_t head = batch_.num_kv_heads * range / ranges, next = batch_.num_kv_heads * (range + 1) / ranges;
      tasks.push_back(
          {seq, token, tokens, head, next - head, part_begin, part_end, is_apart, order, whole / (parts * ranges)});
    }
  }
}

void Plan::add_prefill(int64_t seq, int num_threads) {
  const int64_t tokens = batch_.query_lens[seq], heads = batch_.num_kv_heads;
  int64_t size = std::max<int64_t>(1, kPrefillRows / group_);
  while (size > 1 && size * group_ > 2 * kRows && divide_up(tokens, size) * heads < num_threads * kTasksPerThread) {
    size = (size + 1) / 2;
  }
  for (int64_t first = 0; first < tokens; first += size) {
    const int64_t count = std::min(size, tokens - first), position = batch_.seq_lens[seq] - tokens + first;
    const int64_t from = first_key(position), begin = from / kTileKeys * kTileKeys;
    const int64_t end = position + count, task_cost = cost_of(position + count / 2 + 1 - from, count);
    for (int64_t head = 0; head < heads; ++head) {
      tasks.push_back({seq, tokens_[seq] + first, count, head, 1, begin, end, false, Task::Order::kAlone, task_cost});
    }
  }
}

// The queries of all members together, so that a tile of keys is packed once for them. Many rows are not held up by
// reading the cache: one head a task leaves the most to choose from to threads that are done.
void Plan::add_shared(const SharedPrefix& prefix, int64_t target) {
  const auto num_members = static_cast<int64_t>(prefix.seqs.size()), heads = batch_.num_kv_heads;
  int64_t rows = 0;
  for (const int64_t seq : prefix.seqs) rows += batch_.query_lens[seq] * group_;
  const int64_t sections = std::min(num_members, divide_up(rows, kPrefillRows));
  const int64_t parts = divide_up(prefix.num_keys, kPartitionKeys);
  for (int64_t section = 0; section < sections; ++section) {
    const auto first = static_cast<int64_t>(queries.size());
    for (int64_t i = num_members * section / sections; i < num_members * (section + 1) / sections; ++i) {
      const int64_t seq = prefix.seqs[i], token = tokens_[seq];
      for (int64_t j = 0; j < batch_.query_lens[seq]; ++j) queries.push_back(Query(queries[token + j]));
    }
    const int64_t count = static_cast<int64_t>(queries.size()) - first;
    const int64_t whole = cost_of(prefix.num_keys, count) * heads, pieces = divide_up(whole, target);
    const int64_t ranges = is_stream(count) ? std::clamp<int64_t>(divide_up(pieces, parts), 1, heads) : heads;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * kPartitionKeys, end = std::min(prefix.num_keys, begin + kPartitionKeys);
      for (int64_t range = 0; range < ranges; ++range) {
        const int64_t head = heads * range / ranges, next = heads * (range + 1) / ranges;
        tasks.push_back({prefix.seqs[0], first, count, head, next - head, begin, end, true, Task::Order::kShared,
                         cost_of(end - begin, count) * (next - head)});
        ++num_shared;
      }
    }
  }
}

}  // namespace pagoda::attention
