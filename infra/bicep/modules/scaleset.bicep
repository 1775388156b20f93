metadata description = 'A scale set whose VMs get notices of deletions and new OS images. It is independent of the other modules.'

param name string
param location string = resourceGroup().location
param tags object = {}

@description('Resource id of the subnet.')
param subnetId string

param adminUsername string = 'azureuser'
param sshPublicKey string

@description('Resource ids of the user-assigned identities of imds-bridge; if empty, the set gets a system-assigned one.')
param identityIds string[] = []

@description('General-purpose sizes: others, such as G, M, N and H, get no notice of a new OS image.')
param vmSize string = 'Standard_D2s_v5'

@description('At most 100, and at most 1,000 without singlePlacementGroup.')
@minValue(0)
@maxValue(1000)
param instanceCount int = 2

@description('Whether one placement group is enough. Once it is false, it cannot be changed back.')
param singlePlacementGroup bool = true

@description('Availability zones, for example 1, 2 and 3; empty: none.')
param zones string[] = []

param imageReference object = {
  publisher: 'Canonical'
  offer: 'ubuntu-24_04-lts'
  sku: 'server'
  version: 'latest'
}

@description('cloud-init for each VM, in base64; empty: none.')
@secure()
param customData string = ''

@description('Minutes that a deletion waits for its approval.')
@minValue(5)
@maxValue(15)
param terminateNoticeMinutes int = 10

@description('Whether a new OS image and a reimage are announced; the notice is always 15 minutes.')
param osImageNotice bool = true

@description('Whether Azure approves reboots and redeployments that a user starts, before any listener can.')
param approveUserInitiated bool = false

@description('Whether Azure approves an event when all instances are down at once, as it does by default.')
param approveAllInstancesDown bool = true

@description('Whether Azure publishes scheduled events to Event Grid and Resource Graph, too (preview).')
param publishToEventGrid bool = false

@description('Backend pools of load balancers, such as loadbalancer.bicep returns.')
param backendPoolIds string[] = []

resource scaleSet 'Microsoft.Compute/virtualMachineScaleSets@2025-04-01' = {
  name: name
  location: location
  tags: tags
  zones: zones
  sku: {
    name: vmSize
    capacity: (singlePlacementGroup && (instanceCount > 100)) ? fail('more than 100 instances need singlePlacementGroup false') : instanceCount
  }
  identity: {
    type: empty(identityIds) ? 'SystemAssigned' : 'UserAssigned'
    userAssignedIdentities: empty(identityIds) ? null : toObject(identityIds, id => id, id => {})
  }
  properties: {
    orchestrationMode: 'Uniform'
    singlePlacementGroup: singlePlacementGroup ? null : false // true is Azure's default
    scheduledEventsPolicy: {
      allInstancesDown: {
        automaticallyApprove: approveAllInstancesDown
      }
      userInitiatedReboot: {
        automaticallyApprove: approveUserInitiated
      }
      userInitiatedRedeploy: {
        automaticallyApprove: approveUserInitiated
      }
      scheduledEventsAdditionalPublishingTargets: {
        eventGridAndResourceGraph: {
          enable: publishToEventGrid
          scheduledEventsApiVersion: publishToEventGrid ? '2024-07-09' : null
        }
      }
    }
    overprovision: false // an extra VM would run forward and vanish, and look silent
    upgradePolicy: {
      mode: 'Manual' // existing instances change when you upgrade them, see README.md
    }
    virtualMachineProfile: {
      osProfile: {
        computerNamePrefix: take(name, 9)
        adminUsername: adminUsername
        customData: empty(customData) ? null : customData
        linuxConfiguration: {
          disablePasswordAuthentication: true
          ssh: {
            publicKeys: [
              {
                path: '/home/${adminUsername}/.ssh/authorized_keys'
                keyData: sshPublicKey
              }
            ]
          }
        }
      }
      storageProfile: {
        imageReference: imageReference
        osDisk: {
          createOption: 'FromImage'
          managedDisk: {
            storageAccountType: 'Premium_LRS'
          }
        }
      }
      networkProfile: {
        networkInterfaceConfigurations: [
          {
            name: 'nic'
            properties: {
              primary: true
              ipConfigurations: [
                {
                  name: 'ip'
                  properties: {
                    subnet: {
                      id: subnetId
                    }
                    loadBalancerBackendAddressPools: map(backendPoolIds, id => { id: id })
                  }
                }
              ]
            }
          }
        ]
      }
      scheduledEventsProfile: {
        terminateNotificationProfile: {
          enable: true
          notBeforeTimeout: 'PT${terminateNoticeMinutes}M'
        }
        osImageNotificationProfile: {
          enable: osImageNotice
          notBeforeTimeout: 'PT15M'
        }
      }
    }
  }
}

output id string = scaleSet.id
output principalId string = empty(identityIds) ? scaleSet.identity.principalId : ''
