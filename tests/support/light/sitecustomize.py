"""Loaded as Python starts: what a process without quantised weights or scikit-learn loads for nothing is not there.

PEFT would load bitsandbytes, and with it PyTorch's compiler; transformers SciPy, for losses of object detection. The
package needs neither.
"""

import sys

sys.modules["bitsandbytes"] = sys.modules["scipy"] = None  # type: ignore[assignment]
