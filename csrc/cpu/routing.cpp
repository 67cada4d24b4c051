// The choice of each token's experts. vllm_lite/kernels/routing.py is the plain twin, and explains the fields.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common.h"
#include "program.h"
#include "rows.h"

// The same record as `_Record` in vllm_lite/kernels/cpu/routing.py.
struct RoutingRules {
  const float* bias;     // [num_experts] or nullptr
  const float* factors;  // [num_experts] or nullptr
  int64_t num_experts;
  int64_t top;
  int64_t num_groups;
  int64_t groups_per_token;
  float epsilon;
  float scale;
  int32_t sigmoid;  // 0: softmax
  int32_t renormalize;
  int32_t two_of_group;  // whether a group's score is the sum of its two best scores instead of the best one
  int32_t unused;
};

namespace {

constexpr float kLeast = -std::numeric_limits<float>::infinity();

struct RouteRows {
  const RoutingRules* rules;
  const float* logits;
  int64_t logits_stride;
  int32_t* chosen;  // [num_rows][top]
  float* weights;   // [num_rows][top]
};

// The index of the highest score that is not taken, the first of equal ones; NaN counts as the lowest. Finds one
// whatever the scores are, unless all are taken.
int64_t best(const float* scores, const char* taken, int64_t count) {
  int64_t found = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (taken[i]) continue;
    if (found < 0 || scores[i] > scores[found] || (scores[found] != scores[found] && scores[i] == scores[i])) found = i;
  }
  return found;
}

void score(const RoutingRules& rules, const float* logits, float* scores) {
  const int64_t count = rules.num_experts;
  if (rules.sigmoid) {
    for (int64_t i = 0; i < count; ++i) scores[i] = 1 / (1 + std::exp(-logits[i]));
    return;
  }
  float largest = kLeast, total = 0;
  for (int64_t i = 0; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  for (int64_t i = 0; i < count; ++i) total += scores[i] = std::exp(logits[i] - largest);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

float group_score(const RoutingRules& rules, const float* ranked, int64_t size) {
  float first = kLeast, second = kLeast;
  for (int64_t i = 0; i < size; ++i) {
    if (ranked[i] > first) {
      second = first;
      first = ranked[i];
    } else if (ranked[i] > second) {
      second = ranked[i];
    }
  }
  return rules.two_of_group && size > 1 ? first + second : first;
}

// Marks the experts of all but the best groups as taken. `marks` and `scores` have an element for each group.
void leave_out(const RoutingRules& rules, const float* ranked, char* taken, float* scores, char* marks) {
  const int64_t size = rules.num_experts / rules.num_groups;
  for (int64_t group = 0; group < rules.num_groups; ++group) {
    scores[group] = group_score(rules, ranked + group * size, size);
    marks[group] = 0;
  }
  for (int64_t i = 0; i < rules.groups_per_token; ++i) marks[best(scores, marks, rules.num_groups)] = 1;
  for (int64_t i = 0; i < rules.num_experts; ++i) taken[i] = !marks[i / size];
}

void route_row(const RouteRows& op, int64_t row, std::vector<float>& memory, std::vector<char>& marks) {
  const RoutingRules& rules = *op.rules;
  const int64_t count = rules.num_experts;
  float *scores = memory.data(), *ranked = scores + count, *of_groups = ranked + count;
  char *taken = marks.data(), *group_marks = taken + count;
  score(rules, op.logits + row * op.logits_stride, scores);
  for (int64_t i = 0; i < count; ++i) {
    ranked[i] = rules.bias == nullptr ? scores[i] : scores[i] + rules.bias[i];
    taken[i] = 0;
  }
  if (rules.num_groups > 1) leave_out(rules, ranked, taken, of_groups, group_marks);
  int32_t* chosen = op.chosen + row * rules.top;
  float *weights = op.weights + row * rules.top, total = 0;
  for (int64_t j = 0; j < rules.top; ++j) {
    const int64_t expert = best(ranked, taken, count);
    taken[expert] = 1;
    chosen[j] = static_cast<int32_t>(expert);
    total += weights[j] = scores[expert];
  }
  const float divisor = rules.renormalize ? total + rules.epsilon : 1;
  for (int64_t j = 0; j < rules.top; ++j) {
    const float factor = rules.factors == nullptr ? 1 : rules.factors[chosen[j]];
    weights[j] = weights[j] / divisor * factor * rules.scale;
  }
}

void route_rows(const RouteRows& op, int64_t first, int64_t last) {
  static thread_local std::vector<float> memory;
  static thread_local std::vector<char> marks;
  const size_t count = static_cast<size_t>(op.rules->num_experts);
  if (memory.size() < 3 * count) memory.resize(3 * count);
  if (marks.size() < 2 * count) marks.resize(2 * count);
  for (int64_t row = first; row < last; ++row) route_row(op, row, memory, marks);
}

}  // namespace

// logits: float32 [num_rows, num_experts]; chosen: int32, weights: float32, both [num_rows, top]. The chosen groups of
// a token must have at least `top` experts.
VLLM_LITE_API void vllm_lite_route(const RoutingRules* rules, const float* logits, int64_t logits_stride,
                                   int32_t* chosen, float* weights, int64_t num_rows) {
  const RouteRows op = {rules, logits, logits_stride, chosen, weights};
  vllm_lite::over_rows(num_rows, rules->num_experts * (rules->top + 8), &route_rows, op);
}
VLLM_LITE_RECORDABLE(vllm_lite_route)
