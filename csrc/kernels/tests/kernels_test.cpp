// The kernels against loops written out here, with every buffer exactly as large as it may be, so
// that the sanitizers see a byte too many. Runs on the host and, where hb_kernels_cuda() says so
// (the fake driver), through the CUDA path, too.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../casts.h"
#include "../mix.h"
#include "hotbunk_kernels.h"

namespace {

int failures = 0;
#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition,    \
                   hb_kernels_detail());                                          \
      ++failures;                                                                 \
    }                                                                             \
  } while (0)

std::mt19937_64 random_bits(1);
using Bytes = std::vector<unsigned char>;

Bytes random_bytes(size_t n) {
  Bytes b(n);
  for (auto &x : b) x = static_cast<unsigned char>(random_bits());
  return b;
}

size_t size_of(int dtype) { return dtype == HB_BYTES ? 1 : dtype == HB_F32 ? 4 : 2; }

uint32_t widen(int dtype, const unsigned char *p) {
  uint32_t x = 0;
  std::memcpy(&x, p, size_of(dtype));
  if (dtype == HB_BF16) return hb_f32_from_bf16(static_cast<uint16_t>(x));
  if (dtype == HB_F16) return hb_f32_from_f16(static_cast<uint16_t>(x));
  return x;
}

void narrow(int dtype, uint32_t x, unsigned char *p) {
  if (dtype == HB_BF16) x = hb_bf16_from_f32(x);
  if (dtype == HB_F16) x = hb_f16_from_f32(x);
  std::memcpy(p, &x, size_of(dtype));
}

Bytes expected_copy(const unsigned char *src, size_t count, int from, int to) {
  Bytes out(count * size_of(to));
  if (from == to) {
    std::memcpy(out.data(), src, out.size());
    return out;
  }
  for (size_t i = 0; i < count; ++i)
    narrow(to, widen(from, src + i * size_of(from)), out.data() + i * size_of(to));
  return out;
}

// Memory that ends where it may, at an odd address if wanted.
struct Buffer {
  explicit Buffer(size_t n, size_t offset = 0)
      : memory(new unsigned char[n + offset]), p(memory.get() + offset) {}
  std::unique_ptr<unsigned char[]> memory;
  unsigned char *p;
};

void test_casts_of_known_values() {
  CHECK(hb_bf16_from_f32(0x3f808000u) == 0x3f80);  // a tie goes to even
  CHECK(hb_bf16_from_f32(0x3f818000u) == 0x3f82);
  CHECK(hb_bf16_from_f32(0x00018000u) == 0x0002);  // denormals stay
  CHECK(hb_bf16_from_f32(0x7f7fffffu) == 0x7f80);  // rounds to infinity
  CHECK(hb_bf16_from_f32(0xff800001u) == 0xffc0);  // a signalling NaN stays one, quiet
  CHECK(hb_f16_from_f32(0x477fefffu) == 0x7bff);
  CHECK(hb_f16_from_f32(0x477ff000u) == 0x7c00);
  CHECK(hb_f16_from_f32(0x33000000u) == 0x0000);  // half of the smallest denormal: a tie
  CHECK(hb_f16_from_f32(0x33000001u) == 0x0001);
  CHECK(hb_f16_from_f32(0x387fffffu) == 0x0400);  // up to the smallest normal number
  for (uint32_t h = 0; h < 0x10000; ++h) {        // there and back is the identity, NaNs quiet
    const bool nan = (h & 0x7fff) > 0x7c00;
    CHECK(hb_f16_from_f32(hb_f32_from_f16(static_cast<uint16_t>(h))) == (nan ? h | 0x200 : h));
  }
}

void test_copies(const hb_run *run) {
  const int pairs[][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {1, 2}, {1, 3}, {2, 1}, {2, 3}, {3, 1}, {3, 2}};
  for (const auto &pair : pairs) {
    for (size_t count : {0u, 1u, 3u, 15u, 16u, 17u, 63u, 65u, 255u, 1000u, 70001u}) {
      for (size_t offset : {0u, 1u, 2u, 4u, 13u}) {
        const size_t in = count * size_of(pair[0]), out = count * size_of(pair[1]);
        Buffer src(in, offset), dst(out, (offset * 3) % 17);
        const Bytes bits = random_bytes(in);
        if (in != 0) std::memcpy(src.p, bits.data(), in);
        const hb_copy c{src.p, dst.p, static_cast<int64_t>(count), pair[0], pair[1]};
        CHECK(hb_copy_many(&c, 1, run) == HB_K_OK);
        CHECK(count == 0 || expected_copy(src.p, count, pair[0], pair[1]) == Bytes(dst.p, dst.p + out));
      }
    }
  }
}

// Enough bytes for threads and for writes around the cache.
void test_large_table(const hb_run *run) {
  std::vector<Buffer> sources, targets;
  std::vector<hb_copy> table;
  for (int i = 0; i < 300; ++i) {
    const size_t count = i % 50 == 0 ? 700001 : static_cast<size_t>(random_bits() % 3000);
    const int from = 1 + i % 3, to = 1 + (i / 3) % 3;
    sources.emplace_back(count * size_of(from), static_cast<size_t>(i % 5));
    targets.emplace_back(count * size_of(to), static_cast<size_t>(i % 7));
    for (size_t k = 0; k < count * size_of(from); ++k)
      sources.back().p[k] = static_cast<unsigned char>(random_bits());
    table.push_back({sources.back().p, targets.back().p, static_cast<int64_t>(count), from, to});
  }
  CHECK(hb_copy_many(table.data(), static_cast<int64_t>(table.size()), run) == HB_K_OK);
  for (const hb_copy &c : table) {
    const auto *got = static_cast<unsigned char *>(c.dst);
    const size_t count = static_cast<size_t>(c.count);
    const Bytes want = expected_copy(static_cast<const unsigned char *>(c.src), count, c.src_dtype, c.dst_dtype);
    CHECK(want.empty() || std::memcmp(want.data(), got, want.size()) == 0);
  }
}

void test_refusals(const hb_run *run) {
  Bytes b = random_bytes(100);
  const Bytes before = b;
  const auto refused = [&](std::vector<hb_copy> table) {
    const int32_t code = hb_copy_many(table.data(), static_cast<int64_t>(table.size()), run);
    CHECK(b == before);
    CHECK(code == HB_K_OK || hb_kernels_detail()[0] != '\0');
    return code;
  };
  unsigned char *p = b.data();
  CHECK(refused({{p, p, 10, 0, 0}}) == HB_K_OVERLAP);
  CHECK(refused({{p, p + 9, 10, 0, 0}}) == HB_K_OVERLAP);
  CHECK(refused({{p, p + 50, 10, 0, 0}, {p + 20, p + 59, 10, 0, 0}}) == HB_K_OVERLAP);
  CHECK(refused({{p, p + 50, 10, 0, 0}, {p + 55, p + 80, 10, 0, 0}}) == HB_K_OVERLAP);
  CHECK(refused({{p, p + 80, 9, 0, 0}, {p + 10, p + 70, 10, 0, 0}, {p + 69, p + 90, 2, 0, 0}}) == HB_K_OVERLAP);
  CHECK(refused({{p, p + 50, 10, 0, 1}}) == HB_K_BAD_DTYPE);
  CHECK(refused({{p, p + 50, 10, 4, 1}}) == HB_K_BAD_DTYPE);
  CHECK(refused({{p, p + 50, 10, -1, -1}}) == HB_K_BAD_DTYPE);
  CHECK(refused({{p, p + 50, -1, 0, 0}}) == HB_K_BAD_ARGUMENT);
  CHECK(refused({{p, p + 50, INT64_MAX, 1, 1}}) == HB_K_BAD_ARGUMENT);
  CHECK(refused({{nullptr, p, 1, 0, 0}}) == HB_K_BAD_ARGUMENT);
  CHECK(refused({{nullptr, nullptr, 0, 0, 0}}) == HB_K_OK);
  CHECK(hb_copy_many(nullptr, 0, run) == HB_K_OK);
  CHECK(hb_copy_many(nullptr, 1, run) == HB_K_BAD_ARGUMENT);
  CHECK(hb_fingerprint(nullptr, 1, nullptr, run) == HB_K_BAD_ARGUMENT);
  CHECK(hb_kernels_set_threads(0) == HB_K_BAD_ARGUMENT);
  CHECK(hb_kernels_set_threads(65) == HB_K_BAD_ARGUMENT);
  hb_run bad = run != nullptr ? *run : hb_run{-1, 0, 0, 0, nullptr};
  bad.device = -2;
  CHECK(hb_copy_many(nullptr, 0, &bad) == HB_K_BAD_ARGUMENT);
  bad = {-1, 0, 0, 2, nullptr};
  CHECK(hb_copy_many(nullptr, 0, &bad) == HB_K_BAD_ARGUMENT);
  bad = {0, 0, 0, HB_RUN_CACHED, nullptr};
  CHECK(hb_copy_many(nullptr, 0, &bad) == HB_K_BAD_ARGUMENT);
  bad = {-1, 99, 0, 0, nullptr};
  CHECK(hb_fingerprint(nullptr, 0, nullptr, &bad) == HB_K_UNAVAILABLE);
  for (int32_t code = -9; code <= 1; ++code) CHECK(hb_kernels_error(code)[0] != '\0');
}

uint64_t by_definition(const unsigned char *p, size_t n, size_t start) {
  uint64_t sum = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t at = start + i, word = at / 4;
    sum += (static_cast<uint64_t>(p[i]) << (at % 4 * 8)) * hb_mix(word % 1024) * hb_outer_key(word / 1024);
  }
  return sum;
}

void test_fingerprints(const hb_run *run) {
  std::vector<Buffer> buffers;
  std::vector<hb_piece> pieces;
  std::vector<uint64_t> want;
  for (size_t n : {0u, 1u, 3u, 4u, 63u, 64u, 65u, 4095u, 4096u, 4097u, 12345u, 65535u, 65536u, 79007u, 800003u}) {
    for (size_t start : {0u, 1u, 2u, 3u, 64u, 4095u, 4096u, 262143u, 1000002u}) {
      buffers.emplace_back(n, (n + start) % 6);
      for (size_t i = 0; i < n; ++i) buffers.back().p[i] = static_cast<unsigned char>(random_bits());
      pieces.push_back({buffers.back().p, static_cast<int64_t>(n), static_cast<int64_t>(start)});
      want.push_back(by_definition(buffers.back().p, n, start));
      uint64_t one = 1;
      CHECK(hb_fingerprint(&pieces.back(), 1, &one, run) == HB_K_OK);
      CHECK(one == want.back());
    }
  }
  std::vector<uint64_t> got(pieces.size(), 5);
  CHECK(hb_fingerprint(pieces.data(), static_cast<int64_t>(pieces.size()), got.data(), run) == HB_K_OK);
  CHECK(got == want);
}

void test_kv(const hb_run *run, int64_t row, int64_t slot_stride, int64_t size) {
  const int64_t layers = 3, planes = 2, slots = 40 * size;
  const int64_t plane = slots * slot_stride, layer = planes * plane;
  Bytes memory = random_bytes(static_cast<size_t>(layers * layer - (slot_stride - row)));
  const Bytes before = memory;
  const hb_kv kv{memory.data(), layers, planes, slots, row, layer, plane, slot_stride};
  const int64_t ids[] = {7, 8, 9, 2, 31, 39, 0};
  const hb_blocks blocks{ids, 7, size, 7 * size - (size > 1 ? 1 : 0)};
  const int64_t tokens = blocks.tokens;
  const auto at = [&](int64_t l, int64_t p, int64_t t) {
    return static_cast<size_t>(l * layer + p * plane + (ids[t / size] * size + t % size) * slot_stride);
  };
  Buffer packed(static_cast<size_t>(layers * planes * tokens * row), 3);
  const auto same_rows = [&](const Bytes &cache) {
    const unsigned char *p = packed.p;
    for (int64_t l = 0; l < layers; ++l)
      for (int64_t q = 0; q < planes; ++q)
        for (int64_t t = 0; t < tokens; ++t, p += row)
          if (std::memcmp(p, cache.data() + at(l, q, t), static_cast<size_t>(row)) != 0) return false;
    return true;
  };
  CHECK(hb_kv_gather(&kv, &blocks, packed.p, run) == HB_K_OK);
  CHECK(same_rows(before) && memory == before);

  Bytes zeroed = before;
  for (int64_t l = 0; l < layers; ++l)
    for (int64_t q = 0; q < planes; ++q)
      for (int64_t t = 0; t < tokens; ++t)
        std::memset(zeroed.data() + at(l, q, t), 0, static_cast<size_t>(row));
  CHECK(hb_kv_zero(&kv, &blocks, run) == HB_K_OK);
  CHECK(memory == zeroed);
  CHECK(hb_kv_scatter(&kv, &blocks, packed.p, run) == HB_K_OK);
  CHECK(memory == before);

  const int64_t wrong[][2] = {{40, HB_K_OUT_OF_RANGE}, {-1, HB_K_OUT_OF_RANGE}, {7, HB_K_OVERLAP}};
  for (const auto &[id, code] : wrong) {
    const int64_t two[] = {7, id};
    const hb_blocks bad{two, 2, size, 2 * size};
    CHECK(hb_kv_scatter(&kv, &bad, packed.p, run) == code);
    CHECK(memory == before);
  }
  const hb_blocks few{ids, 1, size, size + 1};
  CHECK(hb_kv_zero(&kv, &few, run) == HB_K_OUT_OF_RANGE);
  CHECK(hb_kv_gather(&kv, &blocks, memory.data() + 5, run) == HB_K_OVERLAP);
  hb_kv odd = kv;
  odd.plane_stride = slot_stride;
  CHECK(hb_kv_zero(&odd, &blocks, run) == HB_K_BAD_ARGUMENT);
  const hb_blocks none{nullptr, 0, size, 0};
  CHECK(hb_kv_gather(&kv, &none, nullptr, run) == HB_K_OK);
}

void test_many_callers() {
  CHECK(hb_kernels_set_threads(4) == HB_K_OK);
  const Bytes data = random_bytes(3 << 20);
  const uint64_t want = by_definition(data.data(), data.size(), 0);
  std::vector<std::thread> callers;
  std::vector<int> wrong(8);
  for (size_t c = 0; c < wrong.size(); ++c) {
    callers.emplace_back([&, c] {
      const hb_run run{-1, 0, static_cast<int32_t>(c % 4), 0, nullptr};
      const hb_piece piece{data.data(), static_cast<int64_t>(data.size()), 0};
      Bytes copy(data.size());
      const hb_copy all{data.data(), copy.data(), piece.nbytes, 0, 0};
      for (int i = 0; i < 10; ++i) {
        uint64_t got = 0;
        wrong[c] += hb_fingerprint(&piece, 1, &got, &run) != HB_K_OK || got != want;
        std::memset(copy.data(), 0, copy.size());
        wrong[c] += hb_copy_many(&all, 1, &run) != HB_K_OK || copy != data;
      }
    });
  }
  for (auto &t : callers) t.join();
  for (int w : wrong) CHECK(w == 0);

  // A child has none of the threads and starts its own.
  const pid_t child = fork();
  if (child == 0) {
    const hb_piece piece{data.data(), static_cast<int64_t>(data.size()), 0};
    uint64_t got = 0;
    _exit(hb_fingerprint(&piece, 1, &got, nullptr) == HB_K_OK && got == want && hb_kernels_threads() == 4 ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void test_all(const hb_run *run) {
  test_copies(run);
  test_large_table(run);
  test_refusals(run);
  test_fingerprints(run);
  test_kv(run, 48, 48, 16);
  test_kv(run, 7, 7, 4);
  test_kv(run, 10, 25, 3);
  test_kv(run, 24576, 24576, 1);
}

}  // namespace

int main() {
  test_casts_of_known_values();
  test_all(nullptr);
  for (int32_t variant = HB_VARIANT_SCALAR; variant <= HB_VARIANT_AVX512; ++variant) {
    for (int32_t flags : {0, static_cast<int32_t>(HB_RUN_CACHED)}) {
      const hb_run run{-1, variant, 0, flags, nullptr};
      if (hb_kernels_has(variant)) test_all(&run);
    }
  }
  CHECK(hb_kernels_cache() >= 0);
  test_many_callers();
  const bool cuda = hb_kernels_cuda(0) == HB_K_OK;
  if (cuda) {
    const hb_run run{0, 0, 0, 0, nullptr};
    test_all(&run);
  } else {
    CHECK(hb_kernels_detail()[0] != '\0');
  }
  CHECK(hb_kernels_cuda(63) == HB_K_UNAVAILABLE);
  CHECK(cuda == (std::getenv("HOTBUNK_CUDA_LIBRARY") != nullptr));
  std::printf("variant %d, %s CUDA: %d failures\n", hb_kernels_variant(), cuda ? "with" : "without", failures);
  return failures == 0 ? 0 : 1;
}
