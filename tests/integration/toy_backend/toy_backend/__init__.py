"""The smallest engine that keeps the contract: it hashes, holds everything, and never sleeps."""
