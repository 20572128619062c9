#include "decoder/decoder_layers.h"

#include <algorithm>
#include <numeric>

namespace pagoda {

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t kWakingBytes = 4 << 20;  // keys and values of a layer, some 100 us, that are worth waking threads for
constexpr int64_t kFewTokens = 4;          // up to which memory is what takes time: FEW_ROWS of the worker's threads

// Widest rows of each buffer over all layers.
struct Widths {
  int64_t hidden = 0, qkv = 0, attended = 0, wide = 0, gated = 0;

  explicit Widths(const std::vector<DecoderLayer>& layers) {
    for (const DecoderLayer& layer : layers) {
      hidden = std::max(hidden, layer.qkv.num_inputs);
      qkv = std::max(qkv, layer.qkv.num_outputs);
      attended = std::max(attended, layer.output.num_inputs);
      if (layer.mixture) continue;
      wide = std::max(wide, layer.gate_up.num_outputs);
      gated = std::max(gated, layer.down.num_inputs);
    }
  }
  // Attention is done with its buffers before the feed-forward part needs its own.
  int64_t sum() const { return hidden + std::max(qkv + attended, wide + gated); }
};

// out = activation(gate) * up in one product, where that is faster; false: it is not.
bool gated_linear(const LinearWeights& weights, const Activation& activation, const bf16* x, bf16* out,
                  int64_t num_rows, int num_threads) {
  const int64_t inputs = weights.num_inputs, size = weights.num_outputs / 2;
  if (!should_gate(num_rows, size)) return false;
  if (weights.packed) {
    packed_gated_linear(x, inputs, weights.packed, weights.bias, activation, out, num_rows, size, inputs, num_threads);
  } else if (weights.compressed.codes) {
    compressed_gated_linear(x, inputs, weights.compressed, weights.bias, activation, out, num_rows, size, inputs,
                            num_threads);
  } else {
    quantized_gated_linear(x, inputs, weights.quantized, weights.bias, activation, out, num_rows, num_threads);
  }
  return true;
}

// Where helpers cannot attend, the threads of OpenMP compute, unless there are so few tokens that memory is what takes
// time.
Team team_for(const DecoderBatch& batch, const Team& team) {
  if (team.helpers == nullptr || batch.num_tokens <= kFewTokens || can_help_attend(batch.attention)) return team;
  return {team.num_threads, nullptr};
}

void attend(const AttentionBatch& batch, const AttentionCache<bf16>& cache, const bf16* query, bf16* out,
            const Team& team) {
  int num_threads = team.threads();
  if (team.helpers != nullptr) {
    if (paged_attention(batch, cache, query, out, *team.helpers)) return;
    const int64_t keys = std::accumulate(batch.seq_lens, batch.seq_lens + batch.num_seqs, int64_t{0});
    const int64_t bytes = 2 * keys * batch.num_kv_heads * cache.width * static_cast<int64_t>(sizeof(bf16));
    if (bytes >= kWakingBytes) num_threads = team.helpers->count() + 1;
  }
  paged_attention<bf16, bf16>(batch, cache, query, out, num_threads);
}

// Rows of the wanted tokens in all rows of a batch, ascending.
std::vector<int64_t> wanted_rows(const DecoderBatch& batch) {
  std::vector<int64_t> rows;
  int64_t end = 0;
  for (int64_t seq = 0; seq < batch.attention.num_seqs; ++seq) {
    end += batch.attention.query_lens[seq];
    for (int64_t row = end - batch.wanted[seq]; row < end; ++row) rows.push_back(row);
  }
  return rows;
}

void move_row(bf16* table, int64_t from, int64_t to, int64_t size) {
  if (from != to) std::memcpy(table + to * size, table + from * size, size * sizeof(bf16));
}

// Some rows to the front, and back.
void bring_together(bf16* table, const std::vector<int64_t>& rows, int64_t size) {
  for (size_t i = 0; i < rows.size(); ++i) move_row(table, rows[i], static_cast<int64_t>(i), size);
}
void bring_apart(bf16* table, const std::vector<int64_t>& rows, int64_t size) {
  for (size_t i = rows.size(); i-- > 0;) move_row(table, static_cast<int64_t>(i), rows[i], size);
}

// Adapters of the tokens that are computed now.
class Adapters {
 public:
  explicit Adapters(const DecoderAdapters* all) : all_(all) {
    if (all != nullptr) rows_ = all->rows;
  }

  bool change(size_t layer, int matrix) const { return all_ != nullptr && place(layer, matrix) >= 0; }

  // What they add to a layer's product of x, after it.
  void add(size_t layer, int matrix, const LinearWeights& weights, const bf16* x, bf16* out, int num_threads) const {
    if (!change(layer, matrix)) return;
    LoraTable table = all_->table;
    table.parts += place(layer, matrix) * table.num_parts;
    add_lora<bf16, bf16>(x, weights.num_inputs, weights.num_inputs, out, weights.num_outputs, rows_, table,
                         num_threads);
  }

  // From here on there are some tokens alone, ascending.
  void keep(const std::vector<int64_t>& tokens) {
    if (all_ == nullptr) return;
    const LoraRows& before = all_->rows;
    kept_.clear();
    starts_.assign(1, 0);
    for (int64_t group = 0; group < before.num_groups; ++group) {
      for (int64_t i = before.starts[group]; i < before.starts[group + 1]; ++i) {
        const auto found = std::lower_bound(tokens.begin(), tokens.end(), before.rows[i]);
        if (found != tokens.end() && *found == before.rows[i]) kept_.push_back(found - tokens.begin());
      }
      starts_.push_back(static_cast<int64_t>(kept_.size()));
    }
    rows_ = {kept_.data(), starts_.data(), before.num_groups};
  }

 private:
  int64_t place(size_t layer, int matrix) const {
    return all_->places[static_cast<int64_t>(layer) * DecoderAdapters::kMatrices + matrix];
  }

  const DecoderAdapters* all_;
  LoraRows rows_{};
  std::vector<int64_t> kept_, starts_;
};

}  // namespace

int64_t decoder_scratch_size(const std::vector<DecoderLayer>& layers, const DecoderBatch& batch) {
  return batch.num_tokens * Widths(layers).sum();
}

void decoder_layers(const std::vector<DecoderLayer>& layers, DecoderBatch& batch, bf16* x, bf16* scratch,
                    const Team& all) {
  batch.attention.block_table = batch.groups[0].block_table;
  batch.attention.table_stride = batch.groups[0].table_stride;
  const Team team = team_for(batch, all);
  const Widths widths(layers);
  int64_t rows = batch.num_tokens;
  std::vector<int64_t> wanted;
  const int num_threads = team.threads();
  AttentionBatch& attention = batch.attention;
  bf16 *normed = scratch, *qkv = normed + rows * widths.hidden, *attended = qkv + rows * widths.qkv;
  bf16 *wide = qkv, *gated = wide + rows * widths.wide;
  Adapters adapters(batch.adapters);
  for (size_t index = 0; index < layers.size(); ++index) {
    const DecoderLayer& layer = layers[index];
    const int64_t hidden = layer.qkv.num_inputs;
    const CacheGroup& group = batch.groups[layer.group];
    attention.block_table = group.block_table;
    attention.table_stride = group.table_stride;
    rms_norm<bf16>(x, hidden, layer.attention_norm, normed, rows, hidden, layer.eps, layer.weight_offset, num_threads);
    linear(layer.qkv, normed, nullptr, qkv, rows, team);
    adapters.add(index, 0, layer.qkv, normed, qkv, num_threads);
    const Rotation rotation = layer.rotation < 0 ? Rotation{nullptr, nullptr, 0} : batch.rotations[layer.rotation];
    rope_store<bf16>(qkv, layer.qkv.num_outputs, layer.head_norms, rotation.cos, rotation.sin, rotation.half,
                     layer.is_interleaved, group.slot_mapping, layer.k_cache, layer.v_cache, batch.cache, rows,
                     static_cast<int>(attention.num_heads), static_cast<int>(attention.num_kv_heads),
                     static_cast<int>(attention.head_dim), num_threads);
    if (batch.wanted != nullptr && &layer == &layers.back()) {
      wanted = wanted_rows(batch);
      attention.query_lens = batch.wanted;
      rows = static_cast<int64_t>(wanted.size());
      if (rows == 0) return;
      bring_together(x, wanted, hidden);
      bring_together(qkv, wanted, layer.qkv.num_outputs);
      adapters.keep(wanted);
    }
    attention.query_stride = layer.qkv.num_outputs;
    attention.window = layer.window;
    attention.scale = layer.scale;
    attention.softcap = layer.softcap;
    attend(attention, {layer.k_cache, layer.v_cache, attention.head_dim}, qkv, attended, team);
    linear(layer.output, attended, x, x, rows, team);
    adapters.add(index, 1, layer.output, attended, x, num_threads);
    rms_norm<bf16>(x, hidden, layer.mlp_norm, normed, rows, hidden, layer.eps, layer.weight_offset, num_threads);
    if (layer.mixture) {
      mixture(*layer.mixture, normed, x, x, rows, team);
      continue;
    }
    const bool is_changed = adapters.change(index, 2);  // before the activation
    if (is_changed || !gated_linear(layer.gate_up, layer.activation, normed, gated, rows, num_threads)) {
      linear(layer.gate_up, normed, nullptr, wide, rows, team);
      adapters.add(index, 2, layer.gate_up, normed, wide, num_threads);
      act_and_mul<bf16>(wide, layer.gate_up.num_outputs, gated, rows, layer.down.num_inputs, layer.activation,
                        num_threads);
    }
    linear(layer.down, gated, x, x, rows, team);
    adapters.add(index, 3, layer.down, gated, x, num_threads);
  }
  if (batch.wanted != nullptr) bring_apart(x, wanted, layers.back().qkv.num_inputs);
}

int64_t head_scratch_size(const DecoderHead& head, int64_t num_rows) { return 2 * num_rows * head.linear.num_inputs; }

void decoder_logits(const DecoderHead& head, const bf16* x, const int64_t* rows, int64_t num_rows, bf16* scratch,
                    float* logits, float* values, int64_t* indices, const Team& team) {
  const int64_t size = head.linear.num_inputs;
  bf16 *chosen = scratch, *normed = scratch + num_rows * size;
  gather(x, rows, num_rows, size, chosen);
  rms_norm<bf16>(chosen, size, head.norm, normed, num_rows, size, head.eps, head.weight_offset, team.threads());
  linear<float>(head.linear, normed, nullptr, logits, num_rows, team);
  argmax(logits, head.linear.num_outputs, values, indices, num_rows, head.linear.num_outputs, team.threads());
}

#endif

}  // namespace pagoda
