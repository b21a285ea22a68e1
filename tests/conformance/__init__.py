"""The conformance suite: what any rollout backend must prove. Shipped as `hotbunk.conformance`."""
