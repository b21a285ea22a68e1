// A test program: tests are functions that register themselves; a failed check ends the test and is
// counted.
#ifndef HOTBUNK_TESTS_CHECK_H
#define HOTBUNK_TESTS_CHECK_H

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

struct Failed : std::exception {};

struct Test {
  const char *name;
  void (*run)();
};

inline std::vector<Test> &tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char *name, void (*run)()) { tests().push_back({name, run}); }
};

#define TEST(name)                                  \
  static void name();                               \
  static const Register registered_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition);   \
      throw Failed();                                                                 \
    }                                                                                 \
  } while (0)

#define CHECK_EQ(left, right)                                                              \
  do {                                                                                     \
    auto left_ = (left);                                                                   \
    auto right_ = (right);                                                                 \
    if (!(left_ == static_cast<decltype(left_)>(right_))) {                                \
      std::fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #left,     \
                   static_cast<long long>(left_), static_cast<long long>(right_));         \
      throw Failed();                                                                      \
    }                                                                                      \
  } while (0)

// Runs all tests, or those whose name contains argv[1].
inline int run_tests(int argc, char **argv) {
  int failed = 0, ran = 0;
  for (const Test &test : tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    ++ran;
    try {
      test.run();
    } catch (const std::exception &) {
      ++failed;
      std::fprintf(stderr, "FAILED %s\n", test.name);
    }
  }
  std::fprintf(stderr, "%d of %d tests passed\n", ran - failed, ran);
  return failed || !ran;
}

#endif  // HOTBUNK_TESTS_CHECK_H
