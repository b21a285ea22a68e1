# The native library where there is no cmake; see gpu_check.sh.
CXX ?= g++
SOURCES := $(wildcard csrc/src/*.cpp csrc/pool/*.cpp csrc/kernels/*.cpp csrc/kernels/cuda/*.cpp)
FLAGS := -std=c++17 -O3 -fPIC -fvisibility=hidden -Icsrc/include -DHB_X86 -DHB_VERSION='"0.0.0"'

CHIPS := $(foreach chip,80 90 100,$(if $(filter sm_$(chip),$(shell $(NVCC) --list-gpu-code)),$(chip)))

all: $(OUT)/libhotbunk_native.so $(if $(NVCC),$(OUT)/hotbunk_kernels.fatbin)

$(OUT)/avx2.o: csrc/kernels/cpu/avx2.cpp
	$(CXX) $(FLAGS) -mavx2 -mf16c -c $< -o $@
$(OUT)/avx512.o: csrc/kernels/cpu/avx512.cpp
	$(CXX) $(FLAGS) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -c $< -o $@
$(OUT)/libhotbunk_native.so: $(OUT)/avx2.o $(OUT)/avx512.o
	$(CXX) $(FLAGS) -shared $(SOURCES) csrc/kernels/cpu/scalar.cpp $^ -o $@ -ldl -pthread -Wl,-z,nodelete
$(OUT)/hotbunk_kernels.fatbin:
	$(NVCC) -fatbin -std=c++17 -O3 -Icsrc/include \
		$(foreach chip,$(CHIPS),-gencode=arch=compute_$(chip),code=sm_$(chip)) \
		csrc/kernels/cuda/kernels.cu -o $@
