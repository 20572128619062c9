// The layers of a decoder as a class for Python. Of a file's own: it takes as long to compile as bindings.cpp does, and
// beside it.
#include "decoder/decoder_layers.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "python/mixture.h"

#if defined(__AVX512BF16__)

namespace {

using at::Tensor;

// One caller at a time: the scratch memory is kept from call to call.
class DecoderLayers {
 public:
  DecoderLayers(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim)
      : num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {}

  void add(const Tensor& attention_norm, const Tensor& mlp_norm, double eps, double weight_offset,
           const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double head_eps,
           double head_weight_offset, bool head_norms_are_last, const std::vector<LinearTensors>& linears,
           int64_t activation, int rotation, bool is_interleaved, double scale, double softcap, int64_t window,
           const Tensor& k_cache, const Tensor& v_cache, int group) {
    using pagoda::bf16;
    TORCH_CHECK(linears.size() == 4 || linears.size() == 2, "a layer has 4 matrices, or 2 and a mixture, got ",
                linears.size());
    layers_.push_back({
        .attention_norm = data<const bf16>(attention_norm),
        .mlp_norm = data<const bf16>(mlp_norm),
        .eps = static_cast<float>(eps),
        .weight_offset = static_cast<float>(weight_offset),
        .head_norms = {pointer(q_norm), pointer(k_norm), static_cast<float>(head_eps),
                       static_cast<float>(head_weight_offset), head_norms_are_last},
        .qkv = keep(linears[0]),
        .output = keep(linears[1]),
        .gate_up = linears.size() > 2 ? keep(linears[2]) : pagoda::LinearWeights{},
        .down = linears.size() > 2 ? keep(linears[3]) : pagoda::LinearWeights{},
        .activation = {static_cast<pagoda::ActivationKind>(activation)},
        .rotation = rotation,
        .is_interleaved = is_interleaved,
        .scale = static_cast<float>(scale),
        .softcap = static_cast<float>(softcap),
        .window = window,
        .k_cache = data<bf16>(k_cache),
        .v_cache = data<bf16>(v_cache),
        .group = group,
    });
    block_size_ = k_cache.size(1);
    kept_.insert(kept_.end(), {k_cache, v_cache});
  }

  // The last layer's feed-forward part is a mixture.
  void mix(const std::shared_ptr<MixtureTensors>& mixture) {
    layers_.back().mixture = &mixture->mixture;
    mixtures_.push_back(mixture);
  }

  // cos and sin: [max_positions, ..., angles] float32, one pair for each rotation.
  void rotate(const Tensor& cos, const Tensor& sin) { tables_.push_back({cos, sin}); }

  // embedding: [vocab_size, hidden_size], a weight as of a layer; `is_plain`: bfloat16 as they are.
  void ends(const LinearTensors& embedding, bool is_plain, const Tensor& norm, double eps, double weight_offset,
            const LinearTensors& linear) {
    embedding_ = keep(embedding);
    is_plain_ = is_plain;
    head_ = {data<const pagoda::bf16>(norm), static_cast<float>(eps), static_cast<float>(weight_offset), keep(linear)};
  }

  // Rows and starts as of `add_lora`; fields [num_groups, num_places, num_parts, 5]; places [num_layers, 4] of these.
  using AdapterTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

  // block_tables, slot_mappings: one a group.
  void forward(const Tensor& x, const Tensor& query_lens, const Tensor& seq_lens,
               const std::vector<Tensor>& block_tables, const std::vector<Tensor>& slot_mappings,
               const Tensor& positions, const std::optional<AdapterTensors>& adapters) {
    compute(data<pagoda::bf16>(x), rows_of(query_lens, seq_lens, block_tables, slot_mappings, positions), adapters);
  }

  // `forward` of embedded tokens as far as the logits of some rows need it, these, and the argmax of each.
  void forward_to_logits(const Tensor& input_ids, const Tensor& query_lens, const Tensor& seq_lens,
                         const std::vector<Tensor>& block_tables, const std::vector<Tensor>& slot_mappings,
                         const Tensor& positions, const std::optional<AdapterTensors>& adapters, const Tensor& rows,
                         const Tensor& logits, const Tensor& values, const Tensor& indices) {
    const Tensor x = embedded(data<int64_t>(input_ids), input_ids.size(0));
    Rows batch = rows_of(query_lens, seq_lens, block_tables, slot_mappings, positions);
    want(data<int64_t>(rows), rows.size(0), batch);
    compute(data<pagoda::bf16>(x), batch, adapters);
    compute_logits(x, data<int64_t>(rows), rows.size(0), data<float>(logits), data<float>(values),
                   data<int64_t>(indices));
  }

  // A step that decodes the likeliest token of each sequence: `decode_rows`, `forward_to_logits` and `append_rows` in
  // one. False: it is no such step, its tokens have no room, or some logits are not finite. Only the cache has changed
  // then.
  bool decode(const Array<int64_t>& slots, const Array<bool>& is_in_use, const Array<bool>& is_greedy,
              Array<int64_t>& num_tokens, Array<int64_t>& num_computed, const Array<int64_t>& num_blocks,
              Array<int32_t>& tokens, const Array<int32_t>& block_table, const Array<int32_t>& more_tables,
              int64_t max_tokens, Array<int64_t>& token_ids) {
    const pagoda::SequenceColumns columns =
        sequence_columns(is_in_use, is_greedy, num_tokens, num_computed, num_blocks, tokens, block_table);
    const int64_t count = slots.size(), *slot = slots.data();
    int64_t *next = token_ids.mutable_data(), *lengths = num_tokens.mutable_data(),
            *computed = num_computed.mutable_data();
    int32_t* log = tokens.mutable_data();
    const pybind11::gil_scoped_release unlocked;
    rows_.resize(4 * count);
    bool all_greedy = true;
    const int64_t room = std::min(max_tokens, columns.tokens_stride);
    const int64_t most = pagoda::decode_rows(columns, slot, count, block_size_, room, rows_.data(), all_greedy);
    if (most <= 0 || !all_greedy) return false;
    const int64_t num_groups = 1 + more_tables.shape(0), table_size = more_tables.shape(1) * more_tables.shape(2);
    table_.resize(num_groups * count * most);
    mappings_.resize((num_groups - 1) * count);
    std::vector<pagoda::CacheGroup> groups;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int32_t* from = group == 0 ? columns.block_table : more_tables.data() + (group - 1) * table_size;
      int32_t* table = table_.data() + group * count * most;
      for (int64_t row = 0; row < count; ++row) {
        std::copy_n(from + slot[row] * columns.table_stride, most, table + row * most);
      }
      int64_t* mapping = rows_.data() + 3 * count;
      if (group > 0) {
        mapping = mappings_.data() + (group - 1) * count;
        for (int64_t row = 0; row < count; ++row) {
          const int64_t position = rows_[count + row];
          mapping[row] = table[row * most + position / block_size_] * block_size_ + position % block_size_;
        }
      }
      groups.push_back({mapping, table, most});
    }
    ones_.assign(count, 1);
    each_.resize(count);
    std::iota(each_.begin(), each_.end(), 0);
    const int64_t *seq_lens = rows_.data(), *positions = seq_lens + count, *ids = positions + count;
    const Tensor x = embedded(ids, count);
    compute(data<pagoda::bf16>(x), {count, positions, groups, count, ones_.data(), seq_lens});
    const Tensor logits = at::empty({count, head_->linear.num_outputs}, at::TensorOptions(at::kFloat));
    values_.resize(count);
    compute_logits(x, each_.data(), count, data<float>(logits), values_.data(), next);
    if (!std::all_of(values_.begin(), values_.end(), [](float x) { return std::isfinite(x); })) return false;
    pagoda::append_rows(slot, count, next, lengths, computed, log, columns.tokens_stride);
    return true;
  }

 private:
  // Tokens of a step, and their sequences.
  struct Rows {
    int64_t num_tokens;
    const int64_t* positions;
    std::vector<pagoda::CacheGroup> groups;
    int64_t num_seqs;
    const int64_t *query_lens, *seq_lens;
    const int64_t* wanted = nullptr;  // as of a DecoderBatch
  };

  static Rows rows_of(const Tensor& query_lens, const Tensor& seq_lens, const std::vector<Tensor>& block_tables,
                      const std::vector<Tensor>& slot_mappings, const Tensor& positions) {
    std::vector<pagoda::CacheGroup> groups;
    for (size_t i = 0; i < block_tables.size(); ++i) {
      groups.push_back({data<int64_t>(slot_mappings[i]), data<int32_t>(block_tables[i]), block_tables[i].stride(0)});
    }
    return {
        .num_tokens = positions.size(0),
        .positions = data<int64_t>(positions),
        .groups = std::move(groups),
        .num_seqs = query_lens.size(0),
        .query_lens = data<int64_t>(query_lens),
        .seq_lens = data<int64_t>(seq_lens),
    };
  }

  // No more than some rows: of each sequence its tokens from the first of these on.
  void want(const int64_t* rows, int64_t num_rows, Rows& batch) {
    std::vector<bool> is_wanted(batch.num_tokens);
    for (int64_t i = 0; i < num_rows; ++i) is_wanted[rows[i]] = true;
    wanted_.clear();
    auto begin = is_wanted.begin();
    for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
      const auto end = begin + batch.query_lens[seq];
      wanted_.push_back(end - std::find(begin, end, true));
      begin = end;
    }
    batch.wanted = wanted_.data();
  }

  Tensor embedded(const int64_t* ids, int64_t num_tokens) {
    using pagoda::bf16;
    TORCH_CHECK(head_, "tokens and logits need both ends of the model");
    const int64_t size = head_->linear.num_inputs;
    const Tensor x = at::empty({num_tokens, size}, at::TensorOptions(at::kBFloat16));
    if (is_plain_) {
      pagoda::gather(embedding_.packed, ids, num_tokens, size, data<bf16>(x));
    } else if (embedding_.packed) {
      pagoda::packed_embedding(ids, embedding_.packed, data<bf16>(x), num_tokens, size, at::get_num_threads());
#if defined(__AVX512BF16__)
    } else if (embedding_.compressed.codes) {
      pagoda::compressed_embedding(ids, embedding_.compressed, data<bf16>(x), num_tokens, size, at::get_num_threads());
#endif
    } else {
      pagoda::quantized_embedding(ids, embedding_.quantized, data<bf16>(x), num_tokens, at::get_num_threads());
    }
    return x;
  }

  void compute(pagoda::bf16* x, const Rows& rows, const std::optional<AdapterTensors>& adapters = std::nullopt) {
    pagoda::DecoderBatch batch{};
    batch.num_tokens = rows.num_tokens;
    batch.groups = rows.groups;
    batch.wanted = rows.wanted;
    pagoda::DecoderAdapters of_rows;
    if (adapters) {
      const auto& [tokens, starts, fields, places] = *adapters;
      const int64_t num_parts = fields.size(2), group_stride = fields.size(1) * num_parts;
      of_rows = {lora_rows(tokens, starts),
                 {data<const pagoda::LoraPart>(fields), group_stride, num_parts},
                 data<const int64_t>(places)};
      batch.adapters = &of_rows;
    }
    batch.attention.num_seqs = rows.num_seqs;
    batch.attention.query_lens = rows.query_lens;
    batch.attention.seq_lens = rows.seq_lens;
    batch.attention.block_size = block_size_;
    batch.attention.num_heads = num_heads_;
    batch.attention.num_kv_heads = num_kv_heads_;
    batch.attention.head_dim = head_dim_;
    const int64_t token = num_kv_heads_ * head_dim_;
    batch.cache = {block_size_, {block_size_ * token, token, head_dim_}, {block_size_ * token, token, head_dim_}};
    angles_.resize(2 * tables_.size());
    for (size_t i = 0; i < tables_.size(); ++i) {
      const int64_t half = tables_[i].first.size(-1);
      float* angles[2];
      for (int j = 0; j < 2; ++j) {
        angles_[2 * i + j].resize(batch.num_tokens * half);
        angles[j] = angles_[2 * i + j].data();
        pagoda::gather(data<float>(j ? tables_[i].second : tables_[i].first), rows.positions, batch.num_tokens, half,
                       angles[j]);
      }
      batch.rotations.push_back({angles[0], angles[1], static_cast<int>(half)});
    }
    pagoda::decoder_layers(layers_, batch, x, scratch_of(pagoda::decoder_scratch_size(layers_, batch)), team());
  }

  // Of some rows of x.
  void compute_logits(const Tensor& x, const int64_t* rows, int64_t num_rows, float* logits, float* values,
                      int64_t* indices) {
    pagoda::bf16* scratch = scratch_of(pagoda::head_scratch_size(*head_, num_rows));
    pagoda::decoder_logits(*head_, data<pagoda::bf16>(x), rows, num_rows, scratch, logits, values, indices, team());
  }

  pagoda::Team team() { return team_of(helpers_); }

  const pagoda::LinearWeights& keep(const LinearTensors& linear) {
    kept_.insert(kept_.end(), linear.tensors.begin(), linear.tensors.end());
    return linear.weights;
  }

  pagoda::bf16* scratch_of(int64_t size) {
    if (!scratch_.defined() || scratch_.numel() < size) {
      scratch_ = Tensor();  // before there is another
      scratch_ = at::empty({size}, at::TensorOptions(at::kBFloat16));
    }
    return data<pagoda::bf16>(scratch_);
  }

  int64_t num_heads_, num_kv_heads_, head_dim_, block_size_ = 0;
  std::vector<pagoda::DecoderLayer> layers_;
  std::vector<std::pair<Tensor, Tensor>> tables_;
  std::optional<pagoda::DecoderHead> head_;
  pagoda::LinearWeights embedding_{};
  bool is_plain_ = false;
  std::vector<std::vector<float>> angles_;
  Tensor scratch_;
  std::vector<int64_t> wanted_;
  std::vector<int64_t> rows_, ones_, each_;  // of `decode`
  std::vector<int32_t> table_;
  std::vector<int64_t> mappings_;
  std::vector<float> values_;
  std::vector<Tensor> kept_;  // all that helpers read
  std::vector<std::shared_ptr<MixtureTensors>> mixtures_;
  std::unique_ptr<pagoda::Helpers> helpers_;  // ends before that
};

}  // namespace

void bind_decoder_layers(pybind11::module_& module) {
  using AllUnlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  const pybind11::arg as_is = pybind11::arg().noconvert();  // an array of another type is refused, not copied
  module.def("set_num_helpers", &pagoda::set_num_helpers);
  pybind11::class_<DecoderLayers>(module, "decoder_layers")
      .def(pybind11::init<int64_t, int64_t, int64_t>())
      .def("add", &DecoderLayers::add)
      .def("mix", &DecoderLayers::mix)
      .def("rotate", &DecoderLayers::rotate)
      .def("ends", &DecoderLayers::ends)
      .def("forward", &DecoderLayers::forward, AllUnlocked())
      .def("forward_to_logits", &DecoderLayers::forward_to_logits, AllUnlocked())
      .def("decode", &DecoderLayers::decode, as_is, as_is, as_is, as_is, as_is, as_is, as_is, as_is, as_is,
           pybind11::arg(), as_is);
}

#else

void bind_decoder_layers(pybind11::module_&) {}

#endif
