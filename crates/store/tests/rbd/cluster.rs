//! The cluster and its images.
use paravane_store::RbdLocation;
use paravane_store::rbd::{Rbd, RbdError, RbdOptions};
use paravane_test_support::CephCluster;
use std::ops::Deref;

/// The cluster whose configuration `PARAVANE_CEPH_CONF` names.
pub(crate) struct Cluster(CephCluster);

impl Deref for Cluster {
    type Target = CephCluster;

    fn deref(&self) -> &CephCluster {
        &self.0
    }
}

impl Cluster {
    /// The cluster, or `None` and a line in the list of skipped tests.
    pub(crate) fn find(test: &str) -> Option<Self> {
        CephCluster::find(test).map(Self)
    }

    /// Runs a program of Ceph, and returns what it prints.
    pub(crate) fn text(&self, program: &str, arguments: &[&str]) -> String {
        String::from_utf8(self.output(program, arguments)).expect("text")
    }

    pub(crate) fn rbd(&self, arguments: &[&str]) {
        self.run("rbd", arguments);
    }

    /// An image of this test, which goes with the value.
    pub(crate) fn image(&self, name: &str, size: &str, more: &[&str]) -> TestImage<'_> {
        let image = TestImage { cluster: self, name: format!("test-{}-{name}", std::process::id()) };
        let spec = image.spec();
        self.rbd(&[&["create", &spec, "--size", size], more].concat());
        image
    }
}

pub(crate) use paravane_test_support::wait_until;

/// An image of a test.
pub(crate) struct TestImage<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) name: String,
}

impl TestImage<'_> {
    /// POOL/IMAGE, as the program rbd takes it.
    pub(crate) fn spec(&self) -> String {
        format!("pool/{}", self.name)
    }

    pub(crate) fn location(&self) -> RbdLocation {
        RbdLocation {
            pool: "pool".into(),
            image: self.name.clone(),
            conf: Some(self.cluster.conf().into()),
            ..RbdLocation::default()
        }
    }

    pub(crate) fn open(&self) -> Rbd {
        self.open_with(&RbdOptions::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn open_with(&self, options: &RbdOptions) -> Result<Rbd, RbdError> {
        Rbd::open(&self.location(), options)
    }
}

impl Drop for TestImage<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.cluster.rbd(&["snap", "purge", "--no-progress", &self.spec()]);
        self.cluster.rbd(&["rm", "--no-progress", &self.spec()]);
    }
}
