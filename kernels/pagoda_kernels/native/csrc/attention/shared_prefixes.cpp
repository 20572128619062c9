#include "attention/shared_prefixes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/paged_attention_tile.h"

namespace pagoda::attention {
namespace {

class Search {
 public:
  Search(const AttentionBatch& batch, std::vector<Candidate> candidates)
      : batch_(batch), candidates_(std::move(candidates)) {
    // Any order that puts tables with the same beginning side by side will do.
    std::sort(candidates_.begin(), candidates_.end(), [&](const Candidate& a, const Candidate& b) {
      const int64_t num_entries = divide_up(std::min(a.num_keys, b.num_keys), batch_.block_size);
      const int order = std::memcmp(table(a), table(b), static_cast<size_t>(num_entries) * sizeof(int32_t));
      return order == 0 ? a.num_keys < b.num_keys : order < 0;
    });
    common_.push_back(0);
    for (size_t i = 1; i < candidates_.size(); ++i) common_.push_back(common_keys(candidates_[i - 1], candidates_[i]));
  }

  std::vector<SharedPrefix> run() {
    group(0, candidates_.size());
    return std::move(found_);
  }

 private:
  const int32_t* table(const Candidate& candidate) const {
    return batch_.block_table + candidate.seq * batch_.table_stride;
  }

  int64_t common_keys(const Candidate& a, const Candidate& b) const {
    const int64_t most = std::min(a.num_keys, b.num_keys);
    const int32_t* entries = table(a);
    const int32_t* end = entries + divide_up(most, batch_.block_size);
    const int64_t num_blocks = std::mismatch(entries, end, table(b)).first - entries;
    return std::min(most, num_blocks * batch_.block_size / kTileKeys * kTileKeys);
  }

  // Groups of candidates [first, last): one of all of them, or those of the parts that have more in common, whichever
  // saves more. Returns how many keys need not be read again.
  int64_t group(size_t first, size_t last) {
    if (last - first < 2) return 0;
    const size_t num_found = found_.size();
    const int64_t common = *std::min_element(common_.begin() + first + 1, common_.begin() + last);
    int64_t apart = 0;
    size_t from = first;
    for (size_t i = first + 1; i <= last; ++i) {
      if (i < last && common_[i] > common) continue;
      apart += group(from, i);
      from = i;
    }
    const int64_t together = static_cast<int64_t>(last - first - 1) * common;
    if (together <= apart) return apart;
    found_.resize(num_found);
    SharedPrefix& prefix = found_.emplace_back();
    prefix.num_keys = common;
    for (size_t i = first; i < last; ++i) prefix.seqs.push_back(candidates_[i].seq);
    return together;
  }

  const AttentionBatch& batch_;
  std::vector<Candidate> candidates_;
  std::vector<int64_t> common_;  // keys that a candidate has in common with the one before it
  std::vector<SharedPrefix> found_;
};

}  // namespace

std::vector<SharedPrefix> find_shared_prefixes(const AttentionBatch& batch, std::vector<Candidate> candidates) {
  return Search(batch, std::move(candidates)).run();
}

}  // namespace pagoda::attention
